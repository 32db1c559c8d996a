"""Boxes of other machines, used as those of this one are.

Invariants: a box is on a node that answers, the one with the fewest of this process's boxes; when a node is lost every
box there is lost at once, and the node is used again once it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Collection

import zmq
import zmq.asyncio

from hpcrl.errors import UsageError
from hpcrl.run.rundir import RunDir
from hpcrl.sandbox import Unconfined, accounts
from hpcrl.sandbox.box import Box
from hpcrl.sandbox.box_line import BoxLine, SandboxLost
from hpcrl.sandbox.box_root import SYSTEM_IMAGE
from hpcrl.sandbox.limits import BoxLimits
from hpcrl.sandbox.nodes.connection import NodeConnection, NodeFull
from hpcrl.sandbox.pool import PoolCounts
from hpcrl.transport.auth import client_keys
from hpcrl.utils.deadline import Deadline
from hpcrl.utils.retry import Pauses

COME_UP = 120.0  #: seconds that the first node may take to come up
COME_BACK = 60.0  #: seconds without any node, once there was one
LOOK = 0.2  #: seconds between two looks for a node


class NodesPool:
    """A pool whose boxes are on the nodes with sandboxes of an attempt; as `SandboxPool`."""

    def __init__(self, rundir: RunDir, nodes: int, limits: BoxLimits | None = None) -> None:
        """A pool for the event loop that runs.

        Args:
            nodes: how many there are.
            limits: of boxes that are asked for without.

        Raises:
            HpcrlError: if this attempt has no keys.
        """
        self._limits = limits or BoxLimits()
        self._context = zmq.asyncio.Context()
        keys = client_keys(rundir, 0, "sandboxes")
        self._nodes = [NodeConnection(rundir, index, keys, self._context) for index in range(nodes)]
        self._first = os.getpid() % nodes  # so that not all processes begin with the same
        self._numbers = itertools.count(1)
        self._counts = PoolCounts()
        self._uses: dict[object, float] = {}  # boxes in use, and since when
        accounts.keep(self)
        self._closed = self._seen = False

    @contextlib.asynccontextmanager
    async def box(self, image: str = SYSTEM_IMAGE, limits: BoxLimits | None = None) -> AsyncIterator[Box]:
        """As `SandboxPool.box`; the image is one of the node's.

        Raises:
            UsageError: if there is no such image there, a host is none or may not be reached, or the pool is closed.
            DataError, HpcrlError: if it cannot be unpacked there, and why.
            Unconfined: if the node can make no box any more.
            SandboxLost: if the node is lost, or none answers.
        """
        limits = limits or self._limits
        begun = time.monotonic()
        line, node = await self._open(image, limits)
        where = {line: node}
        use, now = object(), time.monotonic()
        self._uses[use] = now
        self._count(used=1, handed_out=1, waited=now - begun)

        async def renew(before: BoxLine) -> BoxLine:
            if node := where.pop(before, None):
                node.close(before)
            line, node = await self._open(image, limits)
            where[line] = node
            return line

        box = Box(line, limits, renew, self._reason)
        try:
            yield box
        finally:
            lost = sum(bool(line.lost) for line in where)
            self._count(used=-1, lost=lost, seconds=time.monotonic() - self._uses.pop(use))
            for line, node in where.items():
                node.close(line)

    async def prepare(self, count: int, image: str = SYSTEM_IMAGE, limits: BoxLimits | None = None) -> None:
        """Have boxes made ahead, `count` of that image on all nodes together.

        Raises:
            UsageError, Unconfined, SandboxLost: as `box`.
        """
        await self._one()
        nodes = [node for node in self._nodes if node.up]
        shares = [count // len(nodes) + (place < count % len(nodes)) for place in range(len(nodes))]
        await asyncio.gather(
            *(
                node.prepare(next(self._numbers), image, limits or self._limits, share)
                for node, share in zip(nodes, shares, strict=True)
                if share
            )
        )

    def counts(self) -> PoolCounts:
        """What this process has done, and has; boxes that nodes have made ahead are not counted."""
        now = time.monotonic()
        running = sum(now - begun for begun in self._uses.values())
        return self._counts._replace(seconds=self._counts.seconds + running)

    async def close(self) -> None:
        """End every box of this pool, those in use too."""
        self._closed = True
        await asyncio.gather(*(node.leave() for node in self._nodes))
        await asyncio.to_thread(self._context.term)
        accounts.settle(self)

    @property
    def closed(self) -> bool:
        """Whether it hands out no box any more."""
        return self._closed

    def drop(self) -> None:
        """End every box after the end of the event loop: with the connections."""
        self._closed = True
        self._context.destroy(linger=0)

    async def __aenter__(self) -> NodesPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _count(self, **more: float) -> None:
        self._counts = self._counts.plus(**more)

    async def _open(self, image: str, limits: BoxLimits) -> tuple[BoxLine, NodeConnection]:
        """A box, and the node that it is on; where that is lost meanwhile, of another."""
        self._check_open()
        self._count(making=1)
        try:
            line, node = await self._tried(image, limits)
            self._count(made=1)
            return line, node
        except Unconfined:
            accounts.failed("unconfined")
            raise
        finally:
            self._count(making=-1)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this pool of sandboxes is closed", "ask for boxes before that")

    async def _tried(self, image: str, limits: BoxLimits) -> tuple[BoxLine, NodeConnection]:
        """A box of a node that has room; tried again while none has."""
        lost: list[SandboxLost] = []
        for pause in Pauses(0.1, 1.0, growth=1.5):
            self._check_open()
            full: set[NodeConnection] = set()
            while node := await self._one(full):
                try:
                    return await node.open(next(self._numbers), image, limits), node
                except NodeFull:
                    full.add(node)
                except SandboxLost as error:
                    lost.append(error)
                    if len(lost) > len(self._nodes):
                        raise
            await asyncio.sleep(pause)
        raise AssertionError

    async def _one(self, but: Collection[NodeConnection] = ()) -> NodeConnection | None:
        """The node that answers and has the fewest boxes of ours; None if only those of `but` answer.

        Raises:
            SandboxLost: if none answers in time.
        """
        deadline = Deadline(COME_BACK if self._seen else COME_UP)
        for node in self._nodes:
            node.begin()
        while not (nodes := [node for node in self._nodes if node.up]):
            self._check_open()
            if deadline.over:
                raise SandboxLost(
                    f"no node with sandboxes has answered for {deadline.seconds:g} s",
                    f"see {self._nodes[0].log}",
                )
            await asyncio.sleep(LOOK)
        self._seen = True
        count = len(self._nodes)
        nodes = [node for node in nodes if node not in but]
        return min(nodes, key=lambda node: (node.used, (node.index - self._first) % count), default=None)

    async def _reason(self, line: BoxLine) -> str:
        return line.reason
