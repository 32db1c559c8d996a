"""Help for tests of the queue: a server in a thread, a peer that speaks raw messages, a line that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from hpcrl.plan import Location, Plan
from hpcrl.run.peers import RolloutPeer, find, publish
from hpcrl.run.rundir import RunDir, write_atomic
from hpcrl.transport import auth, messages
from hpcrl.transport.client import QueueClient
from hpcrl.transport.server import QueueServer

HERE = Location("127.0.0.1", (0,))
PLAN = Plan("run-a", 0, (HERE, HERE), (), HERE)
WAIT = 20.0


def make_rundir(path: Path, plan: Plan = PLAN, dp_size: int = 2) -> RunDir:
    """A run directory with the keys and the plan of one attempt."""
    rundir = RunDir.create(path)
    rundir.make_attempt()
    write_atomic(rundir.plan_file, msgspec.json.encode(plan))
    auth.make_keys(rundir, dp_size)
    return rundir


class Served:
    """A queue server with an event loop of its own in a thread."""

    def __init__(
        self,
        rundir: RunDir,
        handlers: dict[str, Any] | None = None,
        dp_size: int = 2,
        plan: Plan = PLAN,
    ) -> None:
        self.rundir = rundir
        self.dp_size = dp_size
        self.plan = plan
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = QueueServer(rundir, plan, dp_size, handlers or {})
        self.run(self.server.start())

    def run(self, work: Coroutine[Any, Any, Any], timeout: float = WAIT) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    def look(self, at: Callable[[QueueServer], Any]) -> Any:
        """What the server holds, read in its own loop, so that nothing changes meanwhile."""

        async def read() -> Any:
            return at(self.server)

        return self.run(read())

    def block(self, until: threading.Event) -> None:
        """Have the server's loop stand still, as that of a process that was stopped."""
        self._loop.call_soon_threadsafe(until.wait)

    def put(self, rollout_id: int, *shares: Any) -> None:
        self.run(self.server.put(rollout_id, shares))

    def client(self, rank: int = 0, timeout: float = WAIT, **options: Any) -> QueueClient:
        return QueueClient(self.rundir, options.pop("plan", self.plan), rank, self.dp_size, timeout, **options)

    def close(self) -> None:
        self.run(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT)
        self._loop.close()


@contextlib.contextmanager
def raw(
    served: Served, rank: int | None = 0, setup: Callable[[zmq.Socket], None] | None = None
) -> Iterator[zmq.Socket]:
    """A DEALER that says what the test wants, with the key of `rank`."""
    peer = find(served.rundir, RolloutPeer)
    assert peer is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if rank is not None:
            auth.lock_client(dealer, auth.client_keys(served.rundir, rank))
        if setup:
            setup(dealer)
        dealer.connect(f"tcp://{peer.host}:{peer.port}")
        yield dealer


def tell(dealer: zmq.Socket, *said: Any) -> None:
    for message in said:
        dealer.send(messages.pack(message))


def hear(dealer: zmq.Socket, seconds: float = WAIT) -> Any:
    """The next message, without pieces; None if there is none."""
    found = hear_all(dealer, seconds)
    return found[0] if found else None


def hear_all(dealer: zmq.Socket, seconds: float = WAIT) -> Any:
    """The next message and the frames of the answer, if it is one; None if there is none."""
    if not dealer.poll(1000 * seconds):
        return None
    first, *pieces = dealer.recv_multipart()
    message = messages.read_from_server(first)
    return message, messages.join(message.sizes, pieces) if isinstance(message, messages.Answer) else []


def hello(served: Served, rank: int = 0, **changes: Any) -> messages.Hello:
    fields = {
        "protocol": messages.PROTOCOL,
        "run_id": served.plan.run_id,
        "attempt": served.plan.attempt,
        "dp_rank": rank,
    }
    fields |= {"dp_size": served.dp_size, "host": "here"}
    return messages.Hello(**fields | changes)


def until(condition: Callable[[], bool], seconds: float = WAIT) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


class Line:
    """A TCP line in front of a server, which can be cut; the run directory then names it in the server's place.

    `limit`: bytes towards the client after which the line is cut by itself, once.
    """

    def __init__(self, served: Served) -> None:
        peer = find(served.rundir, RolloutPeer)
        assert peer is not None
        self._to = (peer.host, peer.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.limit: int | None = None
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()
        publish(served.rundir, msgspec.structs.replace(peer, port=self._listener.getsockname()[1]))

    def cut(self) -> None:
        """Break all connections; new ones are let through."""
        ends = self._ends
        self._ends = []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
                self.connections += 1
                self._ends += [near, far]
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, towards_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if towards_client and self.limit is not None:
                    self.limit -= len(data)
                    if self.limit < 0:
                        self.limit = None
                        self.cut()
                        return
                sink.sendall(data)
        self.cut()
