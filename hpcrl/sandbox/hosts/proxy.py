"""The process outside of one box that takes its HTTP and HTTPS requests to the hosts that it may reach, and no other.

    CONNECT name:port               bytes both ways, as HTTPS needs
    METHOD http://name[:port]/path  the same, after the head: with the URL's own Host, and `Connection: close`

What it answers itself is one line of text: 403 for a host that is not allowed, 502 for one that cannot be reached.

Invariant: a name is looked up once, and what is connected to is an address that this look-up gave and that is not this
node's; the process has nothing of the box's or the run's open, and ends with the keeper that has started it.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import ipaddress
import os
import re
import resource
import select
import signal
import socket
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from hpcrl.sandbox.system_calls import PARENT_DEATH_SIGNAL, drop_capabilities, prctl, write_kernel
from hpcrl.sandbox.usage import START
from hpcrl.utils.deadline import Deadline
from hpcrl.utils.host_rules import HostRules, split_port

MOST = 32  #: connections at once; more wait until one of these has ended
HEAD = 16 << 10  #: bytes of a request's head
IDLE = 60.0  #: seconds in which nothing is said, after which a connection is ended
_REACH = 10.0  #: seconds that connecting to one address may take
_TRIES = 4  #: addresses of a name that are tried
_PIECE = 64 << 10
_LEAVE = 2.0  #: seconds that what comes after a refused request is read
_FULL = 0.05  #: seconds between two looks whether a connection has ended
_STACK = 256 << 10
_FILES = 256
#: of IPv6: IPv4 addresses behind a translator or a tunnel, which may lead back here
_STANDING = [
    ipaddress.IPv6Network(one) for one in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "::/96")
]
_TARGET = re.compile(r"(?P<method>[A-Z]{1,20}) (?P<target>[!-~]+) HTTP/1\.[01]")
_DROPPED = ("connection", "host", "keep-alive", "proxy-authorization", "proxy-connection", "upgrade")
_REASONS = {400: "Bad Request", 403: "Forbidden", 431: "Request Header Fields Too Large", 502: "Bad Gateway"}


class Unserved(Exception):
    """A request that is answered here.

    Attributes:
        status: of HTTP.
        text: one line.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text

    def answer(self) -> bytes:
        body = f"{self.text}\n".encode(errors="replace")
        head = f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\nContent-Type: text/plain\r\n"
        return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


class Asked(NamedTuple):
    """What a request's head asks for.

    Attributes:
        head: that goes to the host; b"": nothing does, and the request is answered with 200.
    """

    host: str
    port: int
    head: bytes


class HostProxy:
    """The process, as the box's keeper has it.

    Attributes:
        end: the keeper's end of a pair of sockets, at whose end the process has ended.
    """

    def __init__(self, rules: HostRules, closed: Sequence[socket.socket]) -> None:
        """Fork it: to be called before the keeper has a namespace of its own.

        Args:
            closed: what it must not have open.

        Raises:
            OSError: if there can be no more processes.
        """
        self.end, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keeper = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            for number in (self.end, *closed):
                number.close()
            _serve(keeper, its, rules)
        its.close()

    def open(self, door: int) -> None:
        """Hand over the socket that listens inside, which this process has no more then.

        Raises:
            OSError: if it is none, or the process has ended.
        """
        with socket.socket(fileno=door) as found:
            if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError(errno.EINVAL, "what the box has handed out does not listen")
            socket.send_fds(self.end, [b"door"], [found.fileno()])

    def close(self) -> None:
        """End it, and wait until it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self.end.close()


def _serve(keeper: int, end: socket.socket, rules: HostRules) -> None:
    """Be the process."""
    try:
        prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, "ending with the process that started this one")
        if os.getppid() == keeper:
            gc.enable()
            drop_capabilities()
            with contextlib.suppress(OSError):
                write_kernel("/proc/self/oom_score_adj", "1000")
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            files = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
            end.settimeout(START)
            _, found, _, _ = socket.recv_fds(end, 16, 1)
            if found:
                serve_door(socket.socket(fileno=found[0]), end, rules)
    finally:
        os._exit(0)


def serve_door(door: socket.socket, end: socket.socket, rules: HostRules) -> None:
    """Take connections until the other side of `end` is closed."""
    threading.stack_size(_STACK)
    door.setblocking(False)
    busy = threading.Semaphore(MOST)
    while True:
        free = busy.acquire(blocking=False)
        poll = select.poll()
        poll.register(end, select.POLLIN)
        if free:
            poll.register(door, select.POLLIN)
        ready = dict(poll.poll(None if free else _FULL * 1000))
        if end.fileno() in ready:
            return
        if free and not (door.fileno() in ready and _taken(door, busy, rules)):
            busy.release()


def _taken(door: socket.socket, busy: threading.Semaphore, rules: HostRules) -> bool:
    """Begin with a connection that waits, whose end releases `busy`; False if there is none, or no room for it."""
    try:
        client, _ = door.accept()
    except OSError:
        return False
    try:
        threading.Thread(target=_answer, args=(client, busy, rules), daemon=True).start()
    except RuntimeError:
        client.close()
        return False
    return True


def _answer(client: socket.socket, busy: threading.Semaphore, rules: HostRules) -> None:
    try:
        with client, contextlib.suppress(OSError):
            try:
                head, rest = read_head(client)
                asked = asked_for(head)
                server = connected(asked, rules)
            except Unserved as error:
                _refuse(client, error.answer())
                return
            with server:
                if asked.head:
                    relay(client, server, asked.head + rest, b"")
                else:
                    relay(client, server, rest, b"HTTP/1.1 200 Connection established\r\n\r\n")
    finally:
        busy.release()


def _refuse(client: socket.socket, answer: bytes) -> None:
    """Send an answer, and read what else comes: what is closed with bytes unread loses the answer with them."""
    deadline = Deadline(_LEAVE)
    client.settimeout(_LEAVE)
    client.sendall(answer)
    client.shutdown(socket.SHUT_WR)
    while not deadline.over and client.recv(_PIECE):
        client.settimeout(max(0.01, deadline.left))


def read_head(client: socket.socket) -> tuple[bytes, bytes]:
    """(a request's head without its last blank line, what came behind it).

    Raises:
        Unserved: if it is too long, or does not come.
    """
    data = b""
    deadline = Deadline(IDLE)
    while b"\r\n\r\n" not in data:
        if len(data) >= HEAD:
            raise Unserved(431, f"the head of a request may have {HEAD:,} bytes")
        client.settimeout(max(0.01, deadline.left))
        more = client.recv(HEAD - len(data))
        if not more:
            raise Unserved(400, "the request has no end")
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def asked_for(head: bytes) -> Asked:
    """What a head asks for.

    Raises:
        Unserved: if it is nothing that is done here.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    found = _TARGET.fullmatch(first)
    if not found:
        raise Unserved(400, "this is no request to a proxy of HTTP/1.1")
    method, target = found["method"], found["target"]
    try:
        if method == "CONNECT":
            host, port = split_port(target)
            if port is None:
                raise ValueError(f"{target} has no port")
            return Asked(host, port, b"")
        scheme, _, rest = target.partition("://")
        if scheme.lower() != "http":
            raise ValueError(f"{target[:200]} is no http:// URL; https:// goes through CONNECT")
        place, slash, path = re.fullmatch(r"([^/?#]*)(/?)([^#]*)(?:#.*)?", rest).groups()  # type: ignore[union-attr]
        host, port = split_port(place)
    except ValueError as error:
        raise Unserved(400, str(error)) from error
    kept = [line for line in lines if line.partition(":")[0].strip().lower() not in _DROPPED]
    if any("\n" in line or "\r" in line or line[:1] in (" ", "\t") for line in kept):
        raise Unserved(400, "a line of the head continues in the next, which is not read here")
    words = [f"{method} {slash or '/'}{path} HTTP/1.1", f"Host: {place}", *kept, "Connection: close", "", ""]
    return Asked(host, 80 if port is None else port, "\r\n".join(words).encode("latin-1"))


def connected(asked: Asked, rules: HostRules) -> socket.socket:
    """A connection to the host that is asked for.

    Raises:
        Unserved: if it is not allowed, or cannot be reached.
    """
    host = asked.host[:300]
    if not rules.allow(asked.host, asked.port):
        raise Unserved(403, f"{host}:{asked.port} is not among the hosts that this sandbox may reach: {rules}")
    try:
        found = socket.getaddrinfo(asked.host, asked.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unserved(502, f"{host} has no address: {error}") from error
    why = "it has none"
    for family, _, _, _, address in found[:_TRIES]:
        if not rules.also_here and (here := is_here(address)):
            raise Unserved(403, f"{host} is {address[0]}, {here}, which no sandbox may reach")
        try:
            return _connected_to(family, address)
        except OSError as error:
            why = f"{address[0]}: {error.strerror or error}"
    raise Unserved(502, f"{host}:{asked.port} cannot be reached: {why}")


def _connected_to(family: int, address: Any) -> socket.socket:
    """A connection to an address, for which the kernel holds little."""
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        for size in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            server.setsockopt(socket.SOL_SOCKET, size, _PIECE)
        server.settimeout(_REACH)
        server.connect(address)
    except OSError:
        server.close()
        raise
    return server


def is_here(address: Sequence[object]) -> str:
    """What an address is, in words, where it leads to this node or to no single other; "" of another's."""
    number = ipaddress.ip_address(str(address[0]).partition("%")[0])
    number = getattr(number, "ipv4_mapped", None) or number
    if number.is_loopback or number.is_unspecified:
        return "an address of this node"
    if number.is_link_local or number.is_multicast:
        return "an address of no host"
    if any(number in network for network in _STANDING if number.version == 6):
        return "an address that stands for another"
    kind = socket.AF_INET if number.version == 4 else socket.AF_INET6
    try:
        tried = socket.socket(kind, socket.SOCK_STREAM)
    except OSError:  # without this version of the protocol there is no address of it
        return ""
    with tried:
        try:
            tried.bind((str(number), 0))
        except OSError as error:
            return (
                "" if error.errno == errno.EADDRNOTAVAIL else f"of which cannot be told whose it is ({error.strerror})"
            )
    return "an address of this node"


class _Way:
    """Bytes from one socket to another, of which a piece at most is held."""

    def __init__(self, source: socket.socket, sink: socket.socket, first: bytes) -> None:
        self.source = source
        self.sink = sink
        self._held = bytearray(first)
        self._ended = False
        self.done = False

    def wants(self) -> dict[int, int]:
        """What is waited for, of which socket."""
        if self.done:
            return {}
        if self._held:
            return {self.sink.fileno(): select.POLLOUT}
        return {self.source.fileno(): select.POLLIN}

    def move(self) -> None:
        """Read a piece, or write of it; BlockingIOError is not ready."""
        with contextlib.suppress(BlockingIOError):
            if not self._held and not self._ended and not self.done:
                piece = self.source.recv(_PIECE)
                self._ended = not piece
                self._held += piece
            if self._held:
                del self._held[: self.sink.send(self._held)]
        if self._ended and not self._held and not self.done:
            self.done = True
            with contextlib.suppress(OSError):
                self.sink.shutdown(socket.SHUT_WR)


def relay(client: socket.socket, server: socket.socket, to_server: bytes, to_client: bytes) -> None:
    """Hand bytes over, both ways, until both sides have said all, or the host has, or nothing is said for a while.

    Raises:
        OSError: if one of them is gone.
    """
    ways = [_Way(client, server, to_server), _Way(server, client, to_client)]
    for one in (client, server):
        one.setblocking(False)
    while not ways[1].done:
        wanted: dict[int, int] = {}
        for way in ways:
            for number, event in way.wants().items():
                wanted[number] = wanted.get(number, 0) | event
        poll = select.poll()
        for number, event in wanted.items():
            poll.register(number, event)
        ready = poll.poll(IDLE * 1000)
        if not ready:
            return
        for way in ways:
            way.move()
