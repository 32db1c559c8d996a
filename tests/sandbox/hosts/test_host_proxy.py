"""A box that may reach hosts: these by HTTP and HTTPS, and nothing else, least of all the node that it is on.

The server is one of this node's, at an address of its loopback, which production refuses and these tests allow."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrl.errors import UsageError
from hpcrl.sandbox import Box, SandboxLost, SandboxPool
from hpcrl.sandbox.hosts import proxy
from hpcrl.sandbox.hosts.listener import BOUNDS, PORT, open_door
from hpcrl.utils.host_rules import HostRules
from tests.support.able import require
from tests.support.boxes import Loop, alive, family

pytestmark = pytest.mark.process
PYTHON = "/usr/bin/python3"
#: an address of this node that no box's no_proxy names
HERE = "127.0.0.2"
TALK = f"""
import socket, sys
def ask(text):
    with socket.create_connection(("127.0.0.1", {PORT}), 30) as found:
        found.sendall(text)
        data = b""
        while more := found.recv(1 << 16):
            data += more
    return data
"""


class Answer(http.server.BaseHTTPRequestHandler):
    """Says what it was asked."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say(
            f"{self.path} {','.join(self.headers.get_all('Host'))} {self.headers['Connection']} {self.headers['Proxy-Connection']}"
        )

    def do_POST(self) -> None:
        self._say(str(len(self.rfile.read(int(self.headers["Content-Length"])))))

    def _say(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer((HERE, 0), Answer) as found:
        found.daemon_threads = True
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"{HERE}:{found.server_port}"
        found.shutdown()


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    require("namespaces", "python")
    with Loop(warm=0) as made:
        yield made


@pytest.fixture
def box(loop: Loop, server: str) -> Iterator[Box]:
    """One that may reach the server and a name that leads nowhere."""
    with box_of(loop, HostRules((server, "nowhere.invalid"), also_here=True)) as made:
        yield made


@contextlib.contextmanager
def box_of(loop: Loop, hosts: Any) -> Iterator[Box]:
    made = loop.pool.box(hosts=hosts)
    found = loop.run(made.__aenter__())
    try:
        yield found
    finally:
        loop.run(made.__aexit__(None, None, None))


def said(loop: Loop, box: Box, program: str) -> str:
    done = loop.run(box.run([PYTHON, "-c", TALK + program], 60.0))
    assert done.ok, done
    return done.stdout


def own_address() -> list[str]:
    """This node's address in its network, if it has one: nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        try:
            found.connect(("198.51.100.1", 9))
        except OSError:
            return []
        return [found.getsockname()[0]]


def until(done: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def test_python_asks_a_server(loop: Loop, box: Box, server: str) -> None:
    """By the variables alone; the server sees its own name, and nothing that was for the proxy."""
    program = f"import urllib.request as u; print(u.urlopen('http://{server}/a?b').read().decode())"
    assert said(loop, box, program) == f"/a?b {server} close None\n"
    program = f"import urllib.request as u; print(u.urlopen('http://{server}/', b'x' * 3_000_000).read().decode())"
    assert said(loop, box, program) == "3000000\n"


def test_the_server_sees_the_name_of_the_url(loop: Loop, box: Box, server: str) -> None:
    """Not that of another site of its own, which the request may name as well."""
    head = f"GET http://{server} HTTP/1.0\\r\\nhost : other.test\\r\\nHOST: third.test\\r\\n\\r\\n"
    assert said(loop, box, f'print(ask(b"{head}").decode())').endswith(f"\r\n\r\n/ {server} close None\n")


def test_connect(loop: Loop, box: Box, server: str) -> None:
    """Bytes go both ways, as they are."""
    program = f"""
import http.client
found = http.client.HTTPConnection("127.0.0.1", {PORT}, timeout=30)
found.set_tunnel("{HERE}", {server.partition(":")[2]})
found.request("GET", "/inner")
print(found.getresponse().read().decode())
"""
    assert said(loop, box, program) == f"/inner {server} None None\n"


@pytest.mark.parametrize(
    ("request_head", "answer"),
    [
        ("CONNECT other.test:443 HTTP/1.1", "403 .*other.test:443 is not among the hosts .*nowhere.invalid"),
        ("GET http://other.test/ HTTP/1.1", "403 .*other.test:80 is not among"),
        (f"GET http://{HERE}:1/ HTTP/1.1", "403 .*127.0.0.2:1 is not among"),
        ("GET http://nowhere.invalid/ HTTP/1.1", "502 .*nowhere.invalid has no address"),
        ("CONNECT nowhere.invalid:22 HTTP/1.1", "403 "),
        ("CONNECT nowhere.invalid HTTP/1.1", "400 .*no port"),
        ("GET /path HTTP/1.1", "400 .*no http:// URL"),
        ("GET http://nowhere.invalid@other.test/ HTTP/1.1", "403 "),
        ("GET http://other.test#@nowhere.invalid/ HTTP/1.1", "403 .*other.test:80"),
        ("GET ftp://nowhere.invalid/ HTTP/1.1", "400 "),
        ("nonsense", "400 "),
        ("GET http://nowhere.invalid/ HTTP/1.1\\r\\nA: " + "x" * (17 << 10), "431 .*16,384"),
    ],
)
def test_what_is_answered_here(loop: Loop, box: Box, request_head: str, answer: str) -> None:
    """One line, which names the host, and the hosts that there are."""
    found = said(loop, box, f'print(ask(b"{request_head}\\r\\nHost: nowhere.invalid\\r\\n\\r\\n").decode())')
    status, _, body = found.removeprefix("HTTP/1.1 ").partition("\r\n")
    assert re.search(answer, f"{status} {body.partition(chr(10) * 2)[2] or body}".replace("\r\n", " ")), found


def test_a_refused_body_loses_no_answer(loop: Loop, box: Box) -> None:
    head = "POST http://other.test/ HTTP/1.1\\r\\nContent-Length: 1000000\\r\\n\\r\\n"
    assert "403 Forbidden" in said(loop, box, f'print(ask(b"{head}" + b"x" * 1_000_000))')


def test_the_node_itself_is_refused(loop: Loop, server: str) -> None:
    """Where the run's own ports listen: by its loopback and its own addresses, whatever the name."""
    own = [HERE, "localhost", "127.0.0.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "224.0.0.1"]
    own += own_address()
    port = server.partition(":")[2]
    words = [f"{name}:{port}" for name in own]
    with box_of(loop, words) as box:
        found = said(loop, box, f'for word in {words!r}: print(ask(f"CONNECT {{word}} HTTP/1.1\\r\\n\\r\\n".encode()))')
        lines = found.splitlines()
        assert len(lines) == len(words)
        for line in lines:
            assert "403 Forbidden" in line and "no sandbox may reach" in line, line


@pytest.mark.parametrize(
    ("address", "here"),
    [
        *(("127.9.9.9", True), ("0.0.0.0", True), ("::1", True), ("::ffff:10.0.0.1", False), ("fe80::1%lo", True)),
        *(("192.0.2.200", False), ("2001:db8::9", False), ("ff02::1", True), ("::ffff:127.0.0.1", True)),
    ],
)
def test_addresses_of_this_node(address: str, here: bool) -> None:
    assert bool(proxy.is_here((address, 80))) is here
    assert all(proxy.is_here((own, 80)) for own in own_address())


def test_no_way_but_the_proxy(loop: Loop, box: Box, server: str) -> None:
    """The box has no route and makes no socket but of TCP; it can let nothing in either."""
    program = f"""
import errno
def tried(name, work):
    try:
        work()
        print(name, "GOT IT")
    except OSError as error:
        print(name, errno.errorcode[error.errno])
def to(*address):
    return lambda: socket.create_connection(address, 5)
tried("server", to("{HERE}", {server.partition(":")[2]}))
tried("outside", to("192.0.2.1", 80))
tried("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
tried("six", lambda: socket.socket(socket.AF_INET6))
tried("unix", lambda: socket.socket(socket.AF_UNIX))
tried("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
tried("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
tried("mptcp", lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262))
tried("bind", lambda: socket.socket().bind(("127.0.0.1", 0)))
tried("listen", lambda: socket.socket().listen())
tried("ulp", lambda: socket.socket().setsockopt(6, 31, b"tls"))
socket.socket().setsockopt(6, socket.TCP_NODELAY, 1)
"""
    found = dict(line.split(" ", 1) for line in said(loop, box, program).splitlines())
    assert found.pop("server") == "ECONNREFUSED" and found.pop("outside") == "ENETUNREACH"
    assert set(found.values()) == {"EPERM"} and len(found) == 9


def test_variables_give_way(loop: Loop, box: Box) -> None:
    """To those that a command is given."""
    done = loop.run(box.run("echo $http_proxy $HTTPS_PROXY $no_proxy", env={"http_proxy": "mine"}))
    assert done.stdout == f"mine http://127.0.0.1:{PORT} localhost,127.0.0.1\n"


def test_a_box_without_hosts_is_as_ever(loop: Loop, server: str) -> None:
    """It makes no socket and has no variable, also where boxes with hosts are made ahead, and the other way."""

    async def work() -> tuple[str, str, str]:
        async with SandboxPool(warm=1) as pool:
            await pool.prepare(1, hosts=("example.org",))
            await pool.prepare(1)
            found = []
            for hosts in ((), ("example.org",), ("example.net",)):
                async with pool.box(hosts=hosts) as box:
                    done = await box.run([PYTHON, "-c", f"{TALK}print(ask(b'CONNECT a:1 HTTP/1.1\\r\\n\\r\\n'))"])
                    found.append(done.stdout + done.stderr + (await box.run("env")).stdout)
            return found[0], found[1], found[2]

    none, org, net = loop.run(work())
    assert "Operation not permitted" in none and "_proxy" not in none.lower()
    assert "may reach: example.org\\n" in org and "may reach: example.net\\n" in net


def test_a_reset_keeps_the_hosts(loop: Loop, box: Box, server: str) -> None:
    loop.run(box.reset())
    assert "200 OK" in said(loop, box, f"print(ask(b'GET http://{server}/ HTTP/1.1\\r\\n\\r\\n'))")


def test_a_pool_that_may_not_reach(loop: Loop) -> None:
    async def work() -> None:
        async with SandboxPool(warm=0, reach=("*.example.org",)) as pool:
            async with pool.box(hosts=("a.example.org",)):
                pass
            for hosts in (("example.org",), ("a.example.org", "b.test:80"), HostRules(("a.example.org",), True)):
                with pytest.raises(UsageError, match=r"may not reach .*--sandbox-hosts"):
                    async with pool.box(hosts=hosts):
                        pass

    loop.run(work())


def test_the_process_ends_with_the_box(loop: Loop, server: str) -> None:
    """With its end, and with its keeper's, killed; when it is lost itself, so is the box."""
    assert loop.pool._spawner is not None
    spawner = loop.pool._spawner.pid
    before = family(spawner)
    with box_of(loop, (server,)):
        made = family(spawner) - before
        assert len(made) == 3  # keeper, proxy, first process
    until(lambda: not any(map(alive, made)))
    for who in (0, 1):
        with box_of(loop, (server,)) as box:
            made = family(spawner) - before
            os.kill(sorted(made)[who], signal.SIGKILL)
            with pytest.raises(SandboxLost):
                loop.run(box.run("sleep 60"))
            until(lambda made=made: not any(map(alive, made)))


def test_more_connections_wait(loop: Loop, box: Box, server: str) -> None:
    """While 32 are open the next is not answered; it is once one of them has ended."""
    program = f"""
found = [socket.create_connection(("127.0.0.1", {PORT}), 5) for _ in range(33)]
for one in found[:32]:
    one.sendall(b"CONNECT {server} HTTP/1.1\\r\\n\\r\\n")
    assert b"200" in one.recv(100)
found[32].sendall(b"CONNECT {server} HTTP/1.1\\r\\n\\r\\n")
found[32].settimeout(0.5)
try:
    print(found[32].recv(100))
except TimeoutError:
    print("waits")
found[0].close()
found[32].settimeout(20)
print(found[32].recv(100).decode())
"""
    assert said(loop, box, program).startswith("waits\nHTTP/1.1 200")


def test_silence_ends_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its head is there, and after."""
    monkeypatch.setattr(proxy, "IDLE", 0.2)
    mine, its = socket.socketpair()
    with mine, its, pytest.raises(TimeoutError):
        proxy.read_head(its)
    pairs = [socket.socketpair() for _ in range(2)]
    began = time.monotonic()
    proxy.relay(pairs[0][1], pairs[1][1], b"to", b"back")
    assert 0.2 <= time.monotonic() - began < 5
    assert pairs[1][0].recv(10) == b"to" and pairs[0][0].recv(10) == b"back"
    for one in (*pairs[0], *pairs[1]):
        one.close()


def test_a_slow_reader_costs_a_piece() -> None:
    """What one side sends and the other does not read waits with the sender."""
    (client, inner), (host, outer) = socket.socketpair(), socket.socketpair()
    worker = threading.Thread(target=proxy.relay, args=(inner, outer, b"", b""), daemon=True)
    worker.start()
    host.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 64 << 20:
            sent += host.send(b"x" * (1 << 16))
            time.sleep(0.001)
    assert sent < 4 << 20
    host.setblocking(True)
    host.shutdown(socket.SHUT_WR)
    taken = 0
    while more := client.recv(1 << 20):
        taken += len(more)
    assert taken == sent
    worker.join(10)
    assert not worker.is_alive()
    for one in (client, inner, host, outer):
        one.close()


def test_a_network_of_the_nodes_is_no_box(tmp_path: Any) -> None:
    """A container that has the node's network gets no door, and nothing of that network is changed."""
    before = [Path(path).read_text() for path in BOUNDS]
    with pytest.raises(OSError, match="no network namespace"):
        open_door(os.readlink("/proc/self/ns/net"))
    with pytest.raises(OSError, match="besides its loopback"):
        open_door("net:[1]")
    assert before == [Path(path).read_text() for path in BOUNDS]


def test_a_box_has_few_ports(loop: Loop, box: Box) -> None:
    """A socket can be connected to itself, and the kernel's memory for each is no box's."""
    program = "print(*open('/proc/sys/net/ipv4/ip_local_port_range').read().split())"
    assert said(loop, box, program) == "32768 33023\n"


def test_too_many_hosts(loop: Loop) -> None:
    """Refused before the spawner, whose end would be that of all its boxes, hears of them."""
    with box_of(loop, ()) as other:
        with pytest.raises(UsageError, match="200 hosts"), box_of(loop, [f"{i}.a.org" for i in range(200)]):
            pass
        with pytest.raises(UsageError, match="bytes"), box_of(loop, HostRules(("x" * 70_000,))):
            pass
        assert loop.run(other.run("echo alive")).stdout == "alive\n"


@pytest.mark.parametrize("wrong", ["example.org/x", "*"])
def test_words_are_checked(loop: Loop, wrong: str) -> None:
    with pytest.raises(UsageError, match="hosts= of a sandbox"), box_of(loop, (wrong,)):
        pass
