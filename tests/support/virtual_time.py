"""An event loop whose time is made up: when nothing can be done, it is the next moment at which something is due.

Invariants: what is simulated takes no time of the machine and repeats exactly; work in threads takes none of the
simulated time: while some is under way, time stands still.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """asyncio's own, with a clock of its own."""

    def __init__(self) -> None:
        self._now = 0.0
        self._threads = 0
        super().__init__()

    def time(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        self._threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._returned)
        return future

    def _returned(self, _: object) -> None:
        self._threads -= 1

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._threads += 1  # it waits for a thread of its own
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._threads -= 1

    def _run_once(self) -> None:
        while self._scheduled and self._scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(self._scheduled)._scheduled = False
        if not self._ready and not self._threads:
            if not self._scheduled:
                raise RuntimeError("nothing is due any more, and somebody waits")
            self._now = max(self._now, self._scheduled[0]._when)
        super()._run_once()


def simulate(what: Coroutine[Any, Any, T]) -> T:
    """Run it to its end in made-up time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(what)
