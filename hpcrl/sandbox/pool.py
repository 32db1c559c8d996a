"""Boxes made ahead: one is handed out at once, used by one caller, and never handed out again.

Invariant: no file and no process of one use is there in another, for a box is replaced, not cleaned; and there are
never more boxes in use than the pool may have.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.sandbox import accounts
from hpcrl.sandbox.accounts import CountedPool, PoolCounts
from hpcrl.sandbox.box import Box
from hpcrl.sandbox.box_line import BoxLine, Unconfined
from hpcrl.sandbox.kinds import AUTO, PROGRAMS, SYSTEM_IMAGE, Shown, chosen, refuse_image
from hpcrl.sandbox.limits import BoxLimits

_AT_ONCE = 4  #: boxes that are made at a time: more would wait for the processors alone
_KINDS = 4  #: of images and limits, those used last, whose boxes are made ahead

Kind = tuple[str, str, BoxLimits, Shown]  #: who makes a box, its image, its limits, and what else it sees


class SandboxPool(CountedPool):
    """Keeps boxes ready, and hands each to one caller: `async with pool.box("system") as box`.

    Attributes:
        kind: who makes them; "auto" until that is known.
    """

    def __init__(
        self,
        warm: int = 2,
        most: int = 64,
        limits: BoxLimits | None = None,
        kind: str | None = None,
    ) -> None:
        """A pool for the event loop that runs.

        Args:
            warm: boxes of each image and limits that are made ahead.
            most: boxes that may be in use at once; who asks for more waits.
            limits: of boxes that are asked for without.
            kind: who makes their namespaces: "unshare", "bwrap" or "apptainer"; "auto": the first of these that can
                here; None: what HPCRL_SANDBOX_KIND of the environment says, or else "auto".

        Raises:
            UsageError: if a number is too small, or there is no such kind.
        """
        super().__init__(limits)
        self.kind = chosen(kind)
        if warm < 0 or most < 1:
            raise UsageError(
                f"SandboxPool(warm={warm}, most={most})", "give 0 or more warm boxes, and 1 or more in use"
            )
        self._warm = warm
        self._ready: OrderedDict[Kind, deque[BoxLine]] = OrderedDict()
        self._making = asyncio.Semaphore(_AT_ONCE)
        self._places = asyncio.Semaphore(most)
        self._lines: set[BoxLine] = set()
        self._finding = asyncio.Lock()
        self._tasks: dict[asyncio.Task[None], Kind] = {}

    @contextlib.asynccontextmanager
    async def box(
        self, image: str = SYSTEM_IMAGE, limits: BoxLimits | None = None, shown: Shown = ()
    ) -> AsyncIterator[Box]:
        """A box of this caller's alone; it is ended, with all that is in it, when the block is left.

        Args:
            image: "system", the programs of this machine, or the absolute path of an unpacked root file system.
            shown: files and directories that a box of "system" sees besides.

        Raises:
            UsageError: if the image is anything else, or the pool is closed.
            Unconfined: if this machine can make no box.
            SandboxLost: if it ends before it is ready.
        """
        kind = await self._kind(image, limits, shown)
        async with self._place(kind) as line:

            async def renew(before: BoxLine) -> BoxLine:
                self._discard(before)
                return await self._take(kind)

            box = Box(line, kind[2], renew, self.reason)
            try:
                yield box
            finally:
                self._discard(box._line)

    @contextlib.asynccontextmanager
    async def line(self, image: str = SYSTEM_IMAGE, limits: BoxLimits | None = None) -> AsyncIterator[BoxLine]:
        """As `box`, for a box that another process asks."""
        async with self._place(await self._kind(image, limits)) as line:
            try:
                yield line
            finally:
                self._discard(line)

    @contextlib.asynccontextmanager
    async def _place(self, kind: Kind) -> AsyncIterator[BoxLine]:
        """One of the boxes that may be in use."""
        begun = time.monotonic()
        async with self._places:
            try:
                line = await self._take(kind)
            except Unconfined:
                accounts.failed("unconfined")
                raise
            with self._in_use(begun):
                yield line

    async def prepare(self, count: int, image: str = SYSTEM_IMAGE, limits: BoxLimits | None = None) -> None:
        """Make boxes ahead until there are `count` of that image.

        Raises:
            UsageError, Unconfined, SandboxLost: as `box`.
        """
        kind = await self._kind(image, limits)
        lines = self._lines_of(kind)
        await asyncio.gather(*(self._add(kind) for _ in range(count - len(lines))))

    def counts(self) -> PoolCounts:
        warm = sum(not line.lost for lines in self._ready.values() for line in lines)
        return super().counts()._replace(warm=warm)

    async def close(self) -> None:
        """End every box, those in use too; wait until they have ended."""
        self.closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ready.clear()
        await asyncio.gather(*(line.close() for line in list(self._lines)), return_exceptions=True)
        accounts.settle(self)

    @property
    def full(self) -> bool:
        """Whether who asks for a box has to wait until another is given back."""
        return self._places.locked()

    def drop(self) -> None:
        """End every box after the end of the event loop, which waits for nothing any more."""
        self.closed = True
        for line in self._lines:
            line.end("its event loop has ended")

    async def _kind(self, image: str, limits: BoxLimits | None, shown: Shown = ()) -> Kind:
        """What boxes are made of."""
        self._refuse_closed()
        async with self._finding:
            if self.kind == AUTO:
                self.kind = await self._found()
        refuse_image(image, self.kind)
        return self.kind, image, limits or self._limits, shown

    async def _found(self) -> str:
        """The first kind that makes a box here."""
        wrong = []
        for name in PROGRAMS:
            try:
                line = await self._make((name, SYSTEM_IMAGE, self._limits, ()))
            except Unconfined as error:
                wrong.append(error.what.partition(": ")[2])
                continue
            self._lines_of((name, SYSTEM_IMAGE, self._limits, ())).append(line)
            return name
        accounts.failed("unconfined")
        raise Unconfined(f"no sandbox can be made here: {'; '.join(wrong)}")

    def _refuse_closed(self) -> None:
        if self.closed:
            raise UsageError("this pool of sandboxes is closed", "request boxes before it is closed")

    def _lines_of(self, kind: Kind) -> deque[BoxLine]:
        """The boxes that are ready of a kind, which is the one used last from now on."""
        lines = self._ready.setdefault(kind, deque())
        self._ready.move_to_end(kind)
        while len(self._ready) > _KINDS:
            for line in self._ready.popitem(last=False)[1]:
                self._discard(line, used=False)
        return lines

    async def _take(self, kind: Kind) -> BoxLine:
        """A box that nothing has used."""
        lines = self._lines_of(kind)
        line = None
        while lines and line is None:
            line = lines.popleft()
            line = None if line.lost else line
        self._refill(kind)
        return line or await self._make(kind)

    def _refill(self, kind: Kind) -> None:
        under_way = sum(found == kind for found in self._tasks.values())
        for _ in range(self._warm - len(self._ready[kind]) - under_way):
            task = asyncio.get_running_loop().create_task(self._make_ahead(kind))
            self._tasks[task] = kind
            task.add_done_callback(self._tasks.pop)

    async def _make_ahead(self, kind: Kind) -> None:
        with contextlib.suppress(HpcrlError):  # the next caller that asks for a box gets the error
            await self._add(kind)

    async def _add(self, kind: Kind) -> None:
        """Make a box ahead, unless its kind is not among those used last any more."""
        line = await self._make(kind)
        if kind in self._ready:
            self._ready[kind].append(line)
        else:
            self._discard(line, used=False)

    async def _make(self, kind: Kind) -> BoxLine:
        self._refuse_closed()
        self._count(making=1)
        line = BoxLine()
        self._lines.add(line)
        try:
            async with self._making:
                self._refuse_closed()
                name, *what = kind
                await line.make(name, *what)
        except BaseException:
            self._discard(line, used=False)
            raise
        finally:
            self._count(making=-1)
        self._count(made=1)
        return line

    async def reason(self, line: BoxLine) -> str:
        """Why a box has ended, "" if that is not known."""
        with contextlib.suppress(TimeoutError):
            return await asyncio.shield(line.close())
        return ""

    def _discard(self, line: BoxLine, used: bool = True) -> None:
        """End a box, and do not wait for that."""
        if used and line.lost:
            self._count(lost=1)
        line.close().add_done_callback(lambda _: self._lines.discard(line))


_pools: dict[asyncio.AbstractEventLoop, Any] = {}
_make: Callable[[], Any] = SandboxPool


def make_default_with(make: Callable[[], Any]) -> None:
    """Have `default_pool` make its pools with this from now on."""
    global _make
    _make = make


def default_pool() -> Any:
    """The pool of the event loop that runs; it ends with this process, or when the next loop asks for one."""
    loop = asyncio.get_running_loop()
    for other in [other for other in _pools if other.is_closed()]:
        _pools.pop(other).drop()
    if loop not in _pools or _pools[loop].closed:
        _pools[loop] = _make()
    return _pools[loop]
