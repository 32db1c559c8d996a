"""How long something may take.

    deadline = Deadline(30.0)
    while not done() and not deadline.over: ...
    found = poll(look, deadline, every=0.5)        # the first true answer, or None in the end

Invariant: nothing depends on the time of day; the monotonic clock alone is read, once for each question.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import repeat
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
