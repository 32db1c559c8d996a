"""What is tried again: after which failures, how often, for how long, and after which pauses.

    retry(ask, passing=SchedulerSilent, deadline=Deadline(900.0), pauses=Pauses(5.0, 5.0))
    await retry_async(ask, passing=is_passing, deadline=Deadline(60.0), pauses=Pauses(1.0, 30.0), attempts=10)

Invariants: nothing is tried once the deadline is over; what is raised in the end is the last failure itself, with how
often it was tried; what may not pass is raised at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from hpcrl.utils.deadline import Deadline

T = TypeVar("T")
#: which failures may pass: a class of errors, or a question about one
Passing = type[Exception] | Callable[[Exception], bool]


@dataclass(frozen=True)
class Pauses:
    """Pauses that grow.

    Attributes:
        first, most: seconds.
        growth: how many times as long as the last the next is.
        spread: seconds that are added to each, so that not all who ask do it at once.
    """

    first: float
    most: float
    growth: float = 2.0
    spread: float = 0.0

    def after(self, attempt: int) -> float:
        """Seconds after attempt number `attempt`, from 1."""
        return min(self.first * self.growth ** min(attempt - 1, 64) + self.spread, self.most)

    def __iter__(self) -> Iterator[float]:
        """All of them, without end."""
        return map(self.after, count(1))


class Attempts:
    """How often something was tried, and whether it is tried again."""

    def __init__(self, passing: Passing, deadline: Deadline, pauses: Pauses, attempts: int | None = None) -> None:
        """Create one.

        Args:
            attempts: at most; None: as many as there is time for.
        """
        self.made = 0
        self._passing = passing
        self._deadline = deadline
        self._pauses = pauses
        self._attempts = attempts

    def pause(self, error: Exception) -> float:
        """Seconds until it is tried again after this failure, which is raised if it is not.  The failure's `attempts`
        says how often it was tried."""
        self.made += 1
        error.attempts = self.made  # type: ignore[attr-defined]
        may_pass = isinstance(error, self._passing) if isinstance(self._passing, type) else self._passing(error)
        pause = self._pauses.after(self.made)
        if not may_pass or self.made == self._attempts or pause >= self._deadline.left:
            raise error
        return pause


def retry(
    action: Callable[[], T],
    passing: Passing,
    deadline: Deadline,
    pauses: Pauses,
    attempts: int | None = None,
    failed: Callable[[Exception], None] = lambda error: None,
) -> T:
    """What `action` returns.

    Raises the last failure.

    Args:
        passing: after which failures it is tried again.
        attempts: at most.
        failed: told of each failure after which it is.
    """
    tried = Attempts(passing, deadline, pauses, attempts)
    while True:
        try:
            return action()
        except Exception as error:  # noqa: BLE001  (`pause` raises it, unless it may pass)
            pause = tried.pause(error)
            failed(error)
            last = error
        deadline.sleep(pause)
        if deadline.over:
            raise last


async def retry_async(
    action: Callable[[], Awaitable[T]],
    passing: Passing,
    deadline: Deadline,
    pauses: Pauses,
    attempts: int | None = None,
) -> T:
    """As `retry`, for what is awaited."""
    import asyncio  # 30 ms, which `hpcrl status` does without

    tried = Attempts(passing, deadline, pauses, attempts)
    while True:
        try:
            return await action()
        except Exception as error:  # noqa: BLE001  (as in `retry`)
            pause = tried.pause(error)
            last = error
        await asyncio.sleep(pause)
        if deadline.over:  # a sleep may be late
            raise last
