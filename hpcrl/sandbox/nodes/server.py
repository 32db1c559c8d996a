"""The server of a node with sandboxes: it hands boxes of its own pool to clients with a key of the attempt.

Invariants: what a client sends for a box goes to that box alone, and is not read here; with a client's connection, and
with this process, end its boxes; of each stream at most WINDOW bytes are held.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from hpcrl.errors import DataError, HpcrlError, UsageError
from hpcrl.sandbox import BoxLimits, SandboxLost, SandboxPool, Unconfined
from hpcrl.sandbox.box_line import BoxLine
from hpcrl.sandbox.nodes.wire import (
    DATA,
    END,
    GONE,
    OPEN,
    PREPARE,
    READY,
    TAKEN,
    WINDOW,
    BoxEnd,
    BoxMessage,
    BoxRequest,
    SendWindow,
    TakenBytes,
    chunks,
    cost,
    frames_of,
    message_of,
)
from hpcrl.transport import auth, sockets

PROBE = 2.0  #: seconds between two looks for clients that are gone
#: milliseconds between heartbeats of the connection, and of silence until it counts as dead: libzmq's own threads
#: answer them, whatever the user's code does in the process of a client
HEARTBEAT, SILENCE = 2_000, 15_000

Place = tuple[bytes, int]  #: a client's connection, and its number of a box


class _ClientGone(Exception):
    """Nothing can be sent to it any more."""


@dataclass(eq=False)
class _Relay:
    """A box that a client has, or waits for."""

    task: asyncio.Task[None]
    window: SendWindow = field(default_factory=SendWindow)
    waiting: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    held: int = 0  #: what is in `waiting` takes of the window
    taken: TakenBytes = field(default_factory=TakenBytes)


class SandboxServer:
    """Serves boxes of `pool` until it is closed."""

    def __init__(self, keys: auth.ServerKeys, pool: SandboxPool, say: Callable[[str], None]) -> None:
        self._pool = pool
        self._say = say
        self._relays: dict[Place, _Relay] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = zmq.asyncio.Context()
        self._door = auth.CurveAuthenticator(self._context, keys, say)
        self._socket = self._context.socket(zmq.ROUTER)
        sockets.set_limits(self._socket, server=True)
        self._socket.sndhwm = self._socket.rcvhwm = 0  # what is under way is bounded for each box
        self._socket.heartbeat_ivl, self._socket.heartbeat_timeout = HEARTBEAT, SILENCE
        self._socket.router_mandatory = True  # a send to a client that is gone is an error
        auth.lock_server(self._socket, keys)

    def start(self, host: str) -> int:
        """Listen at an address of this machine; returns the port.

        Raises:
            HpcrlError: if that cannot be had.
        """
        try:
            self._socket.bind(sockets.endpoint(host, 0))
        except zmq.ZMQError as error:
            raise HpcrlError(
                f"sandboxes: cannot listen on {host}: {error.strerror}", "is this the host that the plan names?"
            ) from error
        self._spawn(self._listen())
        self._spawn(self._probe())
        return int(self._socket.last_endpoint.rsplit(b":", 1)[1])

    async def close(self) -> None:
        """End every box, and let go of the port."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool.close()
        self._door.stop()
        self._socket.close()
        await asyncio.to_thread(self._context.term)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _listen(self) -> None:
        while True:
            client, *frames = await self._socket.recv_multipart()
            await asyncio.sleep(0)  # which a message that is there already does not
            try:
                self._take(client, message_of(frames))
            except ValueError:  # of another version, or a client gone astray: its other boxes are well
                continue

    def _take(self, client: bytes, message: BoxMessage) -> None:
        kind, number, body = message
        relay = self._relays.get((client, number))
        if kind in (OPEN, PREPARE) and relay is None:
            work = self._box if kind == OPEN else self._prepare
            task = self._spawn(self._answering((client, number), work, body))
            relay = self._relays[client, number] = _Relay(task)
            task.add_done_callback(partial(self._forget, (client, number), relay))
        elif kind == DATA and relay:
            relay.held += cost(body)
            if relay.held > WINDOW:
                relay.task.cancel()
                end = BoxEnd("lost", "more was sent to it than may be under way")
                self._spawn(self._gone((client, number), end))
            relay.waiting.put_nowait(body)
        elif kind == TAKEN and relay:
            relay.window.taken(int.from_bytes(body, "big"))
        elif kind == END and relay:
            relay.task.cancel()

    def _forget(self, place: Place, relay: _Relay, _: object) -> None:
        """A client has a box no more, or never had it."""
        if self._relays.get(place) is relay:
            del self._relays[place]

    async def _gone(self, place: Place, end: BoxEnd) -> None:
        with contextlib.suppress(_ClientGone):
            await self._send(place, GONE, msgspec.msgpack.encode(end))

    async def _send(self, place: Place, kind: bytes, body: bytes = b"") -> None:
        """Send a message.

        Raises:
            _ClientGone: if there is no such client any more.
        """
        client, number = place
        try:
            await self._socket.send_multipart([client, *frames_of(BoxMessage(kind, number, body))])
        except zmq.ZMQError as error:
            raise _ClientGone from error

    async def _answering(
        self, place: Place, work: Callable[[Place, BoxRequest], Coroutine[Any, Any, BoxEnd | None]], body: bytes
    ) -> None:
        """Do what a client asks for, and say how that has ended."""
        try:
            end = await work(place, msgspec.msgpack.decode(body, type=BoxRequest))
        except Unconfined as error:
            end = BoxEnd("unconfined", error.what, error.hint)
        except (UsageError, msgspec.DecodeError, TypeError) as error:
            what, hint = (error.what, error.hint) if isinstance(error, HpcrlError) else (str(error), "")
            end = BoxEnd("usage", what, hint)
        except HpcrlError as error:
            kind = "lost" if isinstance(error, SandboxLost) else "data" if isinstance(error, DataError) else "error"
            end = BoxEnd(kind, error.what, error.hint)
        except _ClientGone:
            end = None
        except Exception as error:  # noqa: BLE001  (its client waits for an answer, whatever went wrong here)
            self._say(f"sandboxes: {type(error).__name__}: {error}")
            end = BoxEnd("lost", f"its node says {type(error).__name__}: {error}")
        if end:
            await self._gone(place, end)

    async def _prepare(self, place: Place, wish: BoxRequest) -> None:
        await self._pool.prepare(wish.count, wish.image, BoxLimits(**wish.limits))
        await self._send(place, READY, b"\0")

    async def _box(self, place: Place, wish: BoxRequest) -> BoxEnd:
        """Hand a box to a client, until one of them has ended."""
        if self._pool.full:
            return BoxEnd("full")
        async with self._pool.line(wish.image, BoxLimits(**wish.limits)) as line:
            await self._send(place, READY, bytes([line.layered]))
            relay = self._relays[place]
            ways = [asyncio.create_task(self._up(place, relay, line)), asyncio.create_task(self._down(place, line))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                found = await asyncio.gather(*ways, return_exceptions=True)
            if any(isinstance(one, _ClientGone) for one in found):
                raise _ClientGone
            return BoxEnd("lost", await self._pool.reason(line) or line.lost or "it has ended")

    async def _up(self, place: Place, relay: _Relay, line: BoxLine) -> None:
        """What the client says goes to the box."""
        with contextlib.suppress(OSError):
            while True:
                data = await relay.waiting.get()
                await line.send(data)
                relay.held -= cost(data)
                if said := relay.taken.due(data):
                    await self._send(place, TAKEN, said)

    async def _down(self, place: Place, line: BoxLine) -> None:
        """What the box says goes to the client."""
        relay = self._relays[place]
        gone: list[_ClientGone] = []

        async def take(data: bytes) -> None:
            try:
                for piece in chunks(data):
                    await relay.window.take(piece)
                    await self._send(place, DATA, piece)
            except _ClientGone as error:
                gone.append(error)
                line.end("its client is gone")

        await line.relay(take)
        if gone:
            raise gone[0]

    async def _probe(self) -> None:
        """End the boxes of clients whose connections have broken."""
        while True:
            await asyncio.sleep(PROBE)
            for client in {client for client, _ in self._relays}:
                try:
                    await self._send((client, 0), TAKEN, bytes(4))
                except _ClientGone:
                    for place in [place for place in self._relays if place[0] == client]:
                        self._relays[place].task.cancel()
