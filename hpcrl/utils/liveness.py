"""Signs of life: when a peer was last heard of, and when it is time for a sign of our own.

    last = LastSign()
    last.heard()                   # whenever there is one
    last.silence > limit           # seconds without one
    if last.due(2.0): beat()       # of our own, every two seconds

Invariant: nothing depends on the time of day, or on the clocks of two hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable


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
