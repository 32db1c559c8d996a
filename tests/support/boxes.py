"""Boxes for tests that are no coroutines: an event loop in a thread of its own, with one pool.

Invariant: when it is left, the pool is closed: no box of it is there any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hpcrl.sandbox import Box, BoxLimits, SandboxPool

T = TypeVar("T")
SECONDS = 120.0


class Loop:
    """The loop and its pool; a context manager."""

    def __init__(self, warm: int = 1, kind: str = "unshare") -> None:
        self._warm = warm
        self._kind = kind
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine returns, or raises."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, SECONDS), self._loop).result(SECONDS + 10)

    def __enter__(self) -> Loop:
        self._thread.start()

        async def pool() -> SandboxPool:
            return SandboxPool(self._warm, kind=self._kind)

        self.pool = self.run(pool())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.pool.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()

    @contextlib.contextmanager
    def box(self, image: str = "system", limits: BoxLimits | None = None) -> Iterator[Box]:
        """A box of the pool's."""
        made = self.pool.box(image, limits)
        box = self.run(made.__aenter__())
        try:
            yield box
        finally:
            self.run(made.__aexit__(None, None, None))


def watchers(pool: SandboxPool) -> list[int]:
    """The processes that watch a pool's boxes."""
    return sorted(line.pid for line in pool._lines if line.pid)


def all_of(pool: SandboxPool) -> set[int]:
    """These, and all that run in its boxes."""
    return {one for pid in watchers(pool) for one in family(pid)}


def family(pid: int) -> set[int]:
    """A process and all that descend from it, by what the kernel says now."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {one for one, parent in parents.items() if parent in found and one not in found}:
        found |= more
    return found


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
