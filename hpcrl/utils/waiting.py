"""How long something may take, what is tried again meanwhile, and when a peer was last heard of.

    deadline = Deadline(30.0)
    while not done() and not deadline.over: ...
    found = poll(look, deadline, every=0.5)        # the first true answer, or None in the end
    retry(ask, passing=SchedulerSilent, deadline=Deadline(900.0), pauses=Pauses(5.0, 5.0))
    await retry_async(ask, passing=is_passing, deadline=Deadline(60.0), pauses=Pauses(1.0, 30.0), attempts=10)

    last = LastSign()
    last.heard()                   # whenever there is one
    last.silence > limit           # seconds without one
    if last.due(2.0): beat()       # of our own, every two seconds

Invariants: nothing depends on the time of day, or on the clocks of two hosts; the monotonic clock alone is read, once
for each question.  Nothing is tried again once the deadline is over; what is raised in the end is the last failure
itself, with how often it was tried; what may not pass is raised at once.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import count, repeat
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """A moment `seconds` from its making.

    Attributes:
        seconds: how long there is in all, for messages; math.inf: for ever.
    """

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, never less than 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether none are."""
        return time.monotonic() >= self._end

    def sleep(self, seconds: float) -> None:
        """Sleep that long, but not beyond the deadline."""
        time.sleep(min(seconds, self.left))

    def __repr__(self) -> str:
        return f"Deadline({self.seconds:g} s, {self.left:.1f} left)"


def poll(look: Callable[[], T | None], deadline: Deadline, every: float | Iterator[float]) -> T | None:
    """The first true answer of `look`; None once the deadline is over.

    Args:
        look: asked at once, then every `every` seconds, and a last time when the deadline is over.
        every: or the pauses one after the other, without end.
    """
    pauses = repeat(every) if isinstance(every, float | int) else every
    while True:
        last = deadline.over
        found = look()
        if found or last:
            return found or None
        deadline.sleep(next(pauses))


# ---- signs of life


class LastSign:
    """The last sign of life of one party, which counts as given when this is made."""

    __slots__ = ("_at", "_clock")

    def __init__(self, ago: float = 0.0, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        """Create one.

        Args:
            ago: seconds that have passed since.
            clock: seconds that never go back.
        """
        self._clock = clock
        self._at = clock() - ago

    def heard(self) -> None:
        """There is a sign now."""
        self._at = self._clock()

    @property
    def silence(self) -> float:
        """Seconds without a sign."""
        return self._clock() - self._at

    def due(self, every: float) -> bool:
        """Whether `every` seconds have passed; if so, a sign counts as given now."""
        if self.silence < every:
            return False
        self.heard()
        return True


# ---- what is tried again

#: which failures may pass: a class of errors, or a question about one
Passing = type[Exception] | Callable[[Exception], bool]


class Pauses:  # not a dataclass: every sandbox imports this file, and `dataclasses` takes 24 ms
    """Pauses that grow."""

    def __init__(self, first: float, most: float, growth: float = 2.0, spread: float = 0.0) -> None:
        """Create one.

        Args:
            first, most: seconds.
            growth: how many times as long as the last the next is.
            spread: seconds that are added to each, so that not all who ask do it at once.
        """
        self._first, self._most, self._growth, self._spread = first, most, growth, spread

    def spread(self, seconds: float) -> Pauses:
        """These, with another spread."""
        return Pauses(self._first, self._most, self._growth, seconds)

    def after(self, attempt: int) -> float:
        """Seconds after attempt number `attempt`, from 1."""
        return min(self._first * self._growth ** min(attempt - 1, 64) + self._spread, self._most)

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
