"""The connection of a process to one node with sandboxes: it is made, watched, and made again.

Invariant: while the connection is whole, each box that was asked for is ready, refused, or ended; once it is not, every
box of it is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from hpcrl.errors import DataError, HpcrlError, UsageError
from hpcrl.run.peers import SandboxPeer, newest
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir
from hpcrl.sandbox import Unconfined
from hpcrl.sandbox.box_line import BoxLine, SandboxLost
from hpcrl.sandbox.limits import BoxLimits
from hpcrl.sandbox.nodes.server import HEARTBEAT, SILENCE
from hpcrl.sandbox.nodes.wire import (
    DATA,
    END,
    GONE,
    MOST,
    OPEN,
    PREPARE,
    READY,
    TAKEN,
    BoxEnd,
    BoxMessage,
    BoxRequest,
    SendWindow,
    TakenBytes,
    chunks,
    frames_of,
    message_of,
)
from hpcrl.transport import sockets
from hpcrl.transport.auth import ClientKeys, lock_client

AGAIN = 1.0  #: seconds between two tries to connect
ANSWER = 900.0  #: seconds that a node may take to make a box, its image included
SHAKE = 20.0  #: seconds until both sides have proved their keys
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_HINT = "make what it was for again, in another box"


class NodeFull(HpcrlError):
    """The node has as many boxes in use as it may have."""


#: what is raised for each kind of a `BoxEnd`
_ERRORS = {
    "data": DataError,
    "error": HpcrlError,
    "full": NodeFull,
    "unconfined": Unconfined,
    "usage": UsageError,
}


class _RemoteBox:
    """A box of a node, as this side has it: what its line writes goes there."""

    def __init__(self, connection: NodeConnection, number: int) -> None:
        self._connection = connection
        self.number = number
        self.line = BoxLine(number)
        self.reader = asyncio.StreamReader(limit=1 << 20)
        self.window = SendWindow()
        self.taken = TakenBytes()
        self.ready: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._task = asyncio.create_task(self._send())

    def write(self, data: bytes) -> None:
        self._unsent.put_nowait(data)

    def close(self) -> None:
        """The line is at its end: the node ends the box."""
        self._task.cancel()
        self._connection.forget(self)

    def end(self, why: str) -> None:
        """The box is gone."""
        if not self.ready.done():
            self.ready.set_exception(SandboxLost(f"no sandbox was made: {why}", _HINT))
            self.ready.exception()  # it may be that nothing waits for it any more
        self.line.end(why)

    async def _send(self) -> None:
        while True:
            for piece in chunks(await self._unsent.get()):
                await self.window.take(piece)
                await self._connection.send(DATA, self.number, piece)


class NodeConnection:
    """The connection to node `index` of an attempt.

    Attributes:
        up: it answers.
        used: boxes of it that this process has or waits for.
    """

    def __init__(self, rundir: RunDir, index: int, keys: ClientKeys, context: zmq.asyncio.Context) -> None:
        self.index = index
        self.up = False
        self._rundir = rundir
        self._keys = keys
        self._context = context
        self._boxes: dict[int, _RemoteBox] = {}
        self._socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._count = 0  #: connections so far
        self._leaving = False

    @property
    def log(self) -> str:
        return str(self._rundir.logs / f"sandbox-{self.index}.log")

    @property
    def used(self) -> int:
        return len(self._boxes)

    def begin(self) -> None:
        """Connect, now and whenever the connection is lost."""
        if self._task is None:
            self._task = asyncio.create_task(self._live())

    async def leave(self) -> None:
        """End the connection, and with it every box."""
        self._leaving = True
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def open(self, number: int, image: str, limits: BoxLimits) -> BoxLine:
        """A box that is ready.

        Raises:
            NodeFull: if the node has no more.
            UsageError, Unconfined, SandboxLost: as `SandboxPool.box`.
        """
        box = self._asked(number)
        try:
            await self.send(OPEN, number, _request(image, limits))
            layered = await asyncio.wait_for(box.ready, ANSWER)
        except TimeoutError:
            box.close()
            raise SandboxLost(f"no sandbox was made: its node gave no answer within {ANSWER:g} s", _HINT) from None
        except BaseException:
            box.close()
            raise
        box.line.connect(box.reader, box, layered != b"\0")
        return box.line

    async def prepare(self, number: int, image: str, limits: BoxLimits, count: int) -> None:
        """Have `count` boxes made ahead.

        Raises:
            UsageError, Unconfined, SandboxLost: as `SandboxPool.prepare`.
        """
        box = self._asked(number)
        try:
            await self.send(PREPARE, number, _request(image, limits, count))
            await asyncio.wait_for(box.ready, ANSWER)
        except TimeoutError:
            raise SandboxLost(f"no sandbox was made: its node gave no answer within {ANSWER:g} s", _HINT) from None
        finally:
            box.close()

    def _asked(self, number: int) -> _RemoteBox:
        """A box to ask for."""
        if not self.up:
            raise SandboxLost("no sandbox was made: the connection to its node is lost", _HINT)
        box = self._boxes[number] = _RemoteBox(self, number)
        return box

    def close(self, line: BoxLine) -> None:
        """End a box, and do not wait for that."""
        if box := self._boxes.get(line.number):
            box.end("it was closed")
            box.close()

    def forget(self, box: _RemoteBox) -> None:
        """Have the node end a box, unless it has ended there."""
        if self._boxes.pop(box.number, None) and self.up:
            self._begin(self.send(END, box.number))

    async def send(self, kind: bytes, number: int, body: bytes = b"") -> None:
        """Send a message; one that cannot leave is of a box that is lost."""
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                await self._socket.send_multipart(frames_of(BoxMessage(kind, number, body)))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    # ---- the connection

    async def _live(self) -> None:
        while True:
            why = "its node is not there"
            try:
                if peer := await asyncio.to_thread(newest, self._rundir, SandboxPeer, self.index):
                    why = await self._connected(peer)
            except Exception as error:  # noqa: BLE001  (whatever it is, such as a file system that hiccups, the next try may do)
                why = f"{type(error).__name__}: {error}"
            finally:
                self._lost(why)
            await asyncio.sleep(AGAIN)

    def _lost(self, why: str) -> None:
        """Every box is lost."""
        if self.up and not self._leaving:
            ready = sum(box.ready.done() for box in self._boxes.values())
            say(f"sandboxes: node {self.index} is lost, with {ready} of this process's: {why}; see {self.log}")
        self.up, self._socket = False, None
        for box in list(self._boxes.values()):
            box.end(f"the connection to its node is lost ({why})")

    async def _connected(self, peer: SandboxPeer) -> str:
        """Serve one connection until it breaks; why it has."""
        sock = self._context.socket(zmq.DEALER)
        sockets.set_limits(sock)
        sock.maxmsgsize = MOST
        sock.sndhwm = sock.rcvhwm = 0  # what is under way is bounded for each box
        sock.heartbeat_ivl, sock.heartbeat_timeout = HEARTBEAT, SILENCE
        lock_client(sock, self._keys)
        monitor = sock.get_monitor_socket(_EVENTS)
        listening: asyncio.Task[None] | None = None
        try:
            sock.connect(sockets.endpoint(peer.host, peer.port))
            event = await asyncio.wait_for(recv_monitor_message(monitor), SHAKE)
            if event["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                return "it refuses connections"
            self._socket, self.up = sock, True
            if self._count:
                say(f"sandboxes: node {self.index} is used again")
            self._count += 1
            listening = asyncio.create_task(self._listen(sock))
            broken = asyncio.ensure_future(recv_monitor_message(monitor))
            try:
                await asyncio.wait([listening, broken], return_when=asyncio.FIRST_COMPLETED)
            finally:
                broken.cancel()
            return "it has ended, or does not answer"
        except TimeoutError:
            return f"it did not prove a key within {SHAKE:g} s"
        finally:  # nothing here may wait: a cancellation in between would leave the sockets open
            if listening:
                listening.cancel()
            sock.disable_monitor()
            monitor.close(linger=0)
            sock.close(linger=0)

    async def _listen(self, sock: zmq.asyncio.Socket) -> None:
        while True:
            frames = await sock.recv_multipart()
            await asyncio.sleep(0)  # which a message that is there already does not
            message = message_of(frames)
            if box := self._boxes.get(message.number):
                self._hear(box, message)

    def _hear(self, box: _RemoteBox, message: BoxMessage) -> None:
        kind, number, body = message
        if kind == DATA:
            box.reader.feed_data(body)
            if said := box.taken.due(body):
                self._begin(self.send(TAKEN, number, said))
        elif kind == TAKEN:
            box.window.taken(int.from_bytes(body, "big"))
        elif kind == READY and not box.ready.done():
            box.ready.set_result(body)
        elif kind == GONE:
            self._ended(box, msgspec.msgpack.decode(body, type=BoxEnd))

    def _ended(self, box: _RemoteBox, end: BoxEnd) -> None:
        """The node has no such box any more."""
        self._boxes.pop(box.number, None)
        if not box.ready.done():
            box.ready.set_exception(_ERRORS.get(end.kind, SandboxLost)(end.text, end.hint))
            box.end(end.text)
            return
        box.line.reason = end.text
        box.reader.feed_eof()  # what it has said before is read first


def _request(image: str, limits: BoxLimits, count: int = 0) -> bytes:
    return msgspec.msgpack.encode(BoxRequest(image, vars(limits), count))
