"""What a stranger sends to a port before he has proved anything, as a program of a second account, and what it costs.

    python -I -c STRANGER KIND HOST PORT COUNT SECONDS

The program keeps COUNT connections open as long as it can, opens another for each that is closed (as many in a second
as COUNT), sends what KIND says (NAME, or frames=BYTES), and after SECONDS prints how many it made and how many were open in the end.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import psutil

from tests.support.attacked import HERE, Attacked
from tests.support.second_user import SecondUser

STRANGER = r"""
import os, random, resource, select, socket, struct, sys, time
(kind, _, size), host, port = sys.argv[1].partition("="), sys.argv[2], int(sys.argv[3])
count, seconds = int(sys.argv[4]), float(sys.argv[5])
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def curve(size):  # a command of so many bytes in place of a HELLO, all of it but the last
    return GREETING + b"\x06" + struct.pack(">Q", size) + bytes(size - 1)


def noise(number):
    draw = random.Random(number)
    kind = draw.randrange(6)
    tail = draw.randbytes(draw.randrange(3000))
    if kind == 0:
        return tail
    if kind == 1:
        return GREETING[: draw.randrange(64)] + tail
    if kind == 2:
        return GREETING + draw.choice([b"\x04", b"\x06", b"\x00", b"\x01"]) + tail
    if kind == 3:
        return GREETING + b"\x04\xc8\x05HELLO\x01\x00" + draw.randbytes(191) + tail
    if kind == 4:
        return REQUEST + b"Authorization: Bearer " + tail.hex().encode() + b"\r\n\r\n" + tail
    line = draw.choice([b"GET / HTTP/1.1\r\n", b"PUT \xff HTTP/9.9\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
    return line + b"\r\n".join(draw.randbytes(20) for _ in range(100)) + b"\r\n\r\n"


SAYS = {
    "idle": lambda number: b"",
    "greeting": lambda number: GREETING,
    "frames": lambda number: curve(int(size)),
    "noise": noise,
    "headers": lambda number: REQUEST + b"".join(b"X-%d: %s\r\n" % (n, b"x" * 1000) for n in range(20_000)),
    "one-header": lambda number: REQUEST + b"X: " + b"x" * 20_000_000,
    "url": lambda number: b"GET /" + b"x" * 20_000_000,
    "body": lambda number: REQUEST + b"Content-Length: 20000000\r\n\r\n" + bytes(20_000_000),
    "chunks": lambda number: REQUEST + b"Transfer-Encoding: chunked\r\n\r\n" + (b"ffff\r\n" + bytes(65535) + b"\r\n") * 300,
    "pipeline": lambda number: (REQUEST + b"Content-Length: 0\r\n\r\n") * 300_000,
    "bad": lambda number: b"BAD \x01\x02 HTTP/1.1\r\n\r\n",
}
poll, alive, made = select.poll(), {}, 0
begun, said = time.monotonic(), {}
while time.monotonic() < begun + seconds:
    allowed = count * (1 + time.monotonic() - begun)
    for _ in range(64):
        if len(alive) >= count or made >= allowed:
            break
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        connection.setblocking(False)
        try:
            connection.connect((host, port))
        except BlockingIOError:
            pass
        except OSError:
            connection.close()
            break
        data = noise(made) if kind == "noise" else said.setdefault(0, SAYS[kind](0))
        alive[connection.fileno()] = [connection, memoryview(data)]
        poll.register(connection, select.POLLIN | select.POLLOUT)
        made += 1
    for number, event in poll.poll(50):
        connection, rest = alive[number]
        try:
            if rest and event & select.POLLOUT:
                alive[number][1] = rest = rest[connection.send(rest[:262144]) :]
                if not rest:
                    poll.modify(connection, select.POLLIN)
            elif event & select.POLLOUT:
                poll.modify(connection, select.POLLIN)
            if event & ~select.POLLOUT and not connection.recv(65536):
                raise OSError
        except BlockingIOError:
            pass
        except OSError:
            poll.unregister(connection)
            connection.close()
            del alive[number]
print(made, len(alive))
"""


@dataclass
class Cost:
    """What an attack cost, and what it came to.

    Attributes:
        grown: bytes of memory that the server had more at worst.
        files: descriptors that it had open at worst.
        calls, elsewhere: seconds that each honest call took during the attack, to this server and to one like it that is
            left alone, in turn: the stranger's own work, and others' on this machine, falls on both.
        made: connections that the stranger made.
        kept: those that were open in the end.
    """

    grown: int = 0
    files: int = 0
    calls: list[float] = field(default_factory=list)
    elsewhere: list[float] = field(default_factory=list)
    made: int = 0
    kept: int = 0

    @property
    def slower(self) -> float:
        """How many times as long the middle call took."""
        return statistics.median(self.calls) / statistics.median(self.elsewhere)


def attack(
    stranger: SecondUser, kind: str, target: Attacked, other: Attacked, count: int = 1_000, seconds: float = 3.0
) -> Cost:
    """The cost of an attack on `target`, which an honest peer asks something meanwhile, as one asks `other`."""
    process, cost = psutil.Process(target.process.pid), Cost()
    running = stranger.start(STRANGER, kind, HERE, str(target.port), str(count), str(seconds))
    while running.poll() is None:
        cost.calls.append(_timed(target.call))
        cost.elsewhere.append(_timed(other.call))
        cost.grown = max(cost.grown, process.memory_info().rss - target.resting)
        cost.files = max(cost.files, process.num_fds())
        time.sleep(0.05)
    made, kept = running.communicate(timeout=30)[0].split()
    cost.made, cost.kept = int(made), int(kept)
    return cost


def costs(stranger: SecondUser, kinds: Iterable[str], target: Attacked, other: Attacked) -> dict[str, Cost]:
    """The cost of each kind of attack, one after another; `target` still answers a new peer, and both are closed."""
    found = {kind: attack(stranger, kind, target, other) for kind in kinds}
    assert all(cost.made >= 64 for cost in found.values()), found
    target.again()
    for one in (target, other):
        one.close()
    return found


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
