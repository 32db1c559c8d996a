"""Boxes of other machines, used as those of this one are.

Invariants: a box is on a node that answers, the one with the fewest of this process's boxes; when a node is lost every
box there is lost at once, and the node is used again once it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Collection, Coroutine
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.run.peers import SandboxPeer, newest
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir
from hpcrl.sandbox import Unconfined, accounts
from hpcrl.sandbox.accounts import CountedPool
from hpcrl.sandbox.box import Box
from hpcrl.sandbox.box_line import REPEAT, BoxLine, SandboxLost
from hpcrl.sandbox.kinds import SYSTEM_IMAGE
from hpcrl.sandbox.limits import BoxLimits
from hpcrl.sandbox.nodes.server import BEAT, KINDS, SILENCE, BoxError, BoxRequest
from hpcrl.transport.auth import sandbox_key
from hpcrl.utils.waiting import Deadline, Pauses

COME_UP = 120.0  #: seconds that the first node may take to come up
COME_BACK = 60.0  #: seconds without any node, once there was one
LOOK = 0.2  #: seconds between two looks for a node
AGAIN = 1.0  #: seconds between two tries to connect
CONNECT = 20.0  #: seconds until a node takes a connection
ANSWER = 900.0  #: seconds that a node may take to make a box


class NodeFull(HpcrlError):
    """The node has as many boxes in use as it may have."""


class _RemoteBox:
    """A box of a node, as this side has it: what its line writes are whole questions, one request each.

    Attributes:
        reason: why it has ended, as its node says.
    """

    def __init__(self, node: _Node, number: int, layered: bool) -> None:
        self.reason = ""
        self.path = f"boxes/{number}"
        self._node = node
        self._reader = asyncio.StreamReader()
        self.line = BoxLine()
        self.line.connect(self._reader, self, layered)

    def write(self, data: bytes) -> None:
        """Ask a question."""
        self._node.begin(self._ask(data))

    async def _ask(self, data: bytes) -> None:
        try:
            self._reader.feed_data(await self._node.request("POST", self.path, data))
        except HpcrlError as error:
            self.reason = error.what
            self.line.end(error.what)

    def close(self) -> None:
        """The line is at its end: the node ends the box."""
        self._node.forget(self)


class _Node:
    """Node `index` of an attempt, and the connection to it.

    Attributes:
        up: it answers.
        used: boxes of it that this process has or waits for.
    """

    def __init__(self, rundir: RunDir, index: int) -> None:
        self.index = index
        self.up = False
        self.log = str(rundir.logs / f"sandbox-{index}.log")
        self._rundir = rundir
        self._boxes: set[_RemoteBox] = set()
        self._opening = 0
        self._numbers = itertools.count(1)
        self._session: aiohttp.ClientSession | None = None
        self._live: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._known = self._leaving = False

    @property
    def used(self) -> int:
        return len(self._boxes) + self._opening

    def connect(self) -> None:
        """Connect, now and whenever the connection is lost."""
        if self._live is None:
            self._live = asyncio.create_task(self._connect())

    async def leave(self) -> None:
        """End the connection, and with it every box."""
        self._leaving = True
        if self._live:
            self._live.cancel()
            await asyncio.gather(self._live, return_exceptions=True)

    async def open(self, image: str, limits: BoxLimits) -> _RemoteBox:
        """A box that is ready.

        Raises:
            NodeFull: if the node has no more.
            UsageError, Unconfined, SandboxLost: as `SandboxPool.box`.
        """
        number = next(self._numbers)
        self._opening += 1
        try:
            wish = msgspec.json.encode(BoxRequest(image, vars(limits)))
            layered = await self.request("PUT", f"boxes/{number}", wish, ANSWER)
        except BaseException:
            self.begin(self._close(f"boxes/{number}"))
            raise
        finally:
            self._opening -= 1
        box = _RemoteBox(self, number, layered != b"\0")
        self._boxes.add(box)
        return box

    def forget(self, box: _RemoteBox) -> None:
        """Have the node end a box, unless it has ended there."""
        if box in self._boxes:
            self._boxes.discard(box)
            self.begin(self._close(box.path))

    async def _close(self, path: str) -> None:
        with contextlib.suppress(HpcrlError):
            await self.request("DELETE", path, seconds=SILENCE)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this meanwhile."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def request(self, method: str, path: str, body: bytes = b"", seconds: float | None = None) -> bytes:
        """The node's answer.

        Args:
            seconds: that it may take; None: who asks has a deadline, or the node is lost.

        Raises:
            SandboxLost: if there is none.
            HpcrlError: what the node says.
        """
        if self._session is None:
            raise SandboxLost("the connection to its node is lost", REPEAT)
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT)
        try:
            async with self._session.request(method, path, data=body, timeout=timeout) as answer:
                data = await answer.read()
        except TimeoutError:
            raise SandboxLost("its node gave no answer in time", REPEAT) from None
        except (aiohttp.ClientError, OSError) as error:
            raise SandboxLost(f"the connection to its node is lost ({error})", REPEAT) from None
        if answer.status == 200:
            return data
        try:
            said = msgspec.json.decode(data, type=BoxError)
        except msgspec.DecodeError:
            raise SandboxLost(f"its node answers {answer.status}", f"see {self.log}") from None
        raise (NodeFull if said.kind == "full" else KINDS[said.kind])(said.text, said.hint)

    async def _connect(self) -> None:
        while True:
            why, session = "its node is gone", None
            try:
                if peer := await asyncio.to_thread(newest, self._rundir, SandboxPeer, self.index):
                    session = aiohttp.ClientSession(
                        URL.build(scheme="http", host=peer.host, port=peer.port, path=f"/{secrets.token_hex(8)}/"),
                        headers={"Authorization": f"Bearer {sandbox_key(self._rundir, self.index, peer.incarnation)}"},
                        connector=aiohttp.TCPConnector(limit=0),
                        cookie_jar=aiohttp.DummyCookieJar(),
                    )
                    why = await self._hear(session)
            except Exception as error:  # noqa: BLE001  (whatever it is, such as a file system that hiccups, the next try may do)
                why = f"{type(error).__name__}: {error}"
            finally:
                self._lost(why)
                if session:
                    await session.close()
            await asyncio.sleep(AGAIN)

    async def _hear(self, session: aiohttp.ClientSession) -> str:
        """Hear the node's beats until they stop; why they have."""
        timeout = aiohttp.ClientTimeout(total=None)
        beats = await asyncio.wait_for(session.get("beats", timeout=timeout), CONNECT)
        if beats.status != 200:
            return f"it answers {beats.status}"
        silent = 0
        while silent * BEAT < SILENCE:  # looks are counted: that this process stood still says nothing of the node
            try:
                if not await asyncio.wait_for(beats.content.readany(), BEAT):
                    return "it has ended"
            except TimeoutError:
                silent += 1
                continue
            silent = 0
            if not self.up:
                self._session, self.up = session, True
                if self._known:
                    say(f"sandboxes: node {self.index} is used again")
                self._known = True
        return f"it has not answered for {SILENCE:g} s"

    def _lost(self, why: str) -> None:
        """Every box is lost."""
        if self.up and not self._leaving:
            count = len(self._boxes)
            say(f"sandboxes: node {self.index} is lost, with {count} of this process's: {why}; see {self.log}")
        self.up, self._session = False, None
        boxes, self._boxes = self._boxes, set()
        for box in boxes:
            box.line.end(f"the connection to its node is lost ({why})")
        for task in self._tasks:
            task.cancel()


class NodesPool(CountedPool):
    """A pool whose boxes are on the nodes with sandboxes of an attempt; as `SandboxPool`."""

    def __init__(self, rundir: RunDir, nodes: int, limits: BoxLimits | None = None) -> None:
        """A pool for the event loop that runs.

        Args:
            nodes: how many there are.
            limits: of boxes that are asked for without.
        """
        super().__init__(limits)
        self._nodes = [_Node(rundir, index) for index in range(nodes)]
        self._first = os.getpid() % nodes  # so that not all processes begin with the same
        self._seen = False

    @contextlib.asynccontextmanager
    async def box(self, image: str = SYSTEM_IMAGE, limits: BoxLimits | None = None) -> AsyncIterator[Box]:
        """As `SandboxPool.box`; the image is one of the node's.

        Raises:
            UsageError: if there is no such image there, or the pool is closed.
            Unconfined: if the node can make no box any more.
            SandboxLost: if the node is lost, or none answers.
        """
        limits = limits or self._limits
        begun = time.monotonic()
        held = [await self._open(image, limits)]

        async def renew(_: BoxLine) -> BoxLine:
            while held:
                held.pop().line.end("it was reset")
            held.append(await self._open(image, limits))
            return held[0].line

        async def reason(_: BoxLine) -> str:
            return held[0].reason if held else ""

        try:
            with self._in_use(begun):
                yield Box(held[0].line, limits, renew, reason)
        finally:
            self._count(lost=sum(bool(box.line.lost) for box in held))
            for box in held:
                box.line.end("it was closed")

    async def close(self) -> None:
        """End every box of this pool, those in use too."""
        self.closed = True
        await asyncio.gather(*(node.leave() for node in self._nodes))
        accounts.settle(self)

    def drop(self) -> None:
        """Every box has ended with the event loop, which has cancelled the task of each connection."""
        self.closed = True

    async def _open(self, image: str, limits: BoxLimits) -> _RemoteBox:
        """A box of a node that has room, waited for while none has; where that is lost meanwhile, of another."""
        self._count(making=1)
        lost = 0
        try:
            for pause in Pauses(0.1, 1.0, growth=1.5):
                full: set[_Node] = set()
                while node := await self._one(full):
                    try:
                        box = await node.open(image, limits)
                        self._count(made=1)
                        return box
                    except NodeFull:
                        full.add(node)
                    except SandboxLost:
                        lost += 1
                        if lost > len(self._nodes):
                            raise
                await asyncio.sleep(pause)
            raise AssertionError
        except Unconfined:
            accounts.failed("unconfined")
            raise
        finally:
            self._count(making=-1)

    async def _one(self, but: Collection[_Node]) -> _Node | None:
        """The node that answers and has the fewest boxes of ours; None if only those of `but` answer.

        Raises:
            UsageError: if this pool is closed.
            SandboxLost: if none answers in time.
        """
        deadline = Deadline(COME_BACK if self._seen else COME_UP)
        for node in self._nodes:
            node.connect()
        while True:
            if self.closed:
                raise UsageError("this pool of sandboxes is closed", "request boxes before it is closed")
            if nodes := [node for node in self._nodes if node.up]:
                break
            if deadline.over:
                raise SandboxLost(
                    f"no node with sandboxes has answered for {deadline.seconds:g} s", f"see {self._nodes[0].log}"
                )
            await asyncio.sleep(LOOK)
        self._seen = True
        count = len(self._nodes)
        nodes = [node for node in nodes if node not in but]
        return min(nodes, key=lambda node: (node.used, (node.index - self._first) % count), default=None)
