"""How busy the engines are: requests in flight of each, who has fewest, and how the load went over time.

Invariants: only this module counts requests in flight; it reads no clock but the one that `Loads` is given; all sums
are of integers, so that nothing drifts in a long run.
"""

from __future__ import annotations

from collections.abc import Callable

#: microseconds: an engine that has requests again within this time was busy throughout, for the timeline
SAME = 100_000


class Loads:
    """Requests in flight of every engine, by its number.

    An engine that was dropped is given no more; those that it still has count nowhere here.

    Attributes:
        total: requests in flight of the engines that are not dropped.
    """

    def __init__(
        self, limit: int, clock: Callable[[], int], busy: Callable[[int, int, int], None] = lambda *_: None
    ) -> None:
        """Create one.

        Args:
            limit: requests that each engine may have.
            clock: microseconds that never go back.
            busy: is told (engine, begin, end) of each time in which an engine had requests.
        """
        self._limit = limit
        self._clock = clock
        self._busy = busy
        self._of: dict[int, int] = {}
        self._spells: dict[int, tuple[int, int | None]] = {}  # (begin, end) of the last busy time; None: it lasts
        self.total = self._most = 0
        self._begun = self._then = clock()
        self._idle = self._held = self._engines = 0  # integrals over time: idle engines, requests, engines

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, engine: int) -> bool:
        return engine in self._of

    def __getitem__(self, engine: int) -> int:
        """What it has in flight; 0 of one that was dropped."""
        return self._of.get(engine, 0)

    def add(self, engine: int) -> None:
        """One more engine, with nothing in flight."""
        self._account()
        self._of[engine] = 0

    def drop(self, engine: int) -> None:
        """An engine that is given no more; asked for twice, the second time does nothing."""
        if engine in self._of:
            self.move(engine, -self._of[engine])
            self._tell(engine, self._account())
            del self._of[engine]

    def move(self, engine: int, by: int) -> None:
        """`by` more requests in flight (or, negative, fewer); nothing for an engine that is not there."""
        if not by or engine not in self._of:
            return
        now, before, load = self._account(), self._of[engine], self._of[engine] + by
        assert load >= 0, f"engine {engine} has {load} requests in flight"
        self._of[engine] = load
        self.total += by
        self._most = max(self._most, self.total)
        begin, end = self._spells.get(engine, (now, now))
        if not before and end is not None and now - end > SAME:
            self._tell(engine, now)
            begin = now
        self._spells[engine] = (begin, None if load else now)

    def least(self) -> int:
        """The engine with fewest in flight; of several, the one that has been there longest."""
        return min(self._of, key=self._of.__getitem__)

    # ---- over time

    def _account(self) -> int:
        """Bring the integrals up to now."""
        now = self._clock()
        passed, self._then = now - self._then, now
        self._idle += passed * list(self._of.values()).count(0)
        self._held += passed * self.total
        self._engines += passed * len(self._of)
        return now

    def _tell(self, engine: int, now: int) -> None:
        """Tell its last busy time, up to now if it lasts."""
        begin, end = self._spells.pop(engine, (now, now))
        end = now if end is None else end
        if end > begin:
            self._busy(engine, begin, end)

    def measures(self) -> dict[str, float]:
        """Since the last call: the share of the engines' time without any request, their requests as a share of what
        they may have, and requests in flight; nothing where there was no engine.  Busy times are told up to now.
        """
        now = self._account()
        for engine, (_, end) in list(self._spells.items()):
            if end is None or now - end > SAME:
                self._tell(engine, now)
            if end is None:
                self._spells[engine] = (now, None)
        found: dict[str, float] = {}
        if self._engines:
            found = {
                "perf/engine_idle_ratio": self._idle / self._engines,
                "perf/engine_occupancy": self._held / (self._engines * self._limit),
                "perf/requests_in_flight": self._held / (now - self._begun),
                "perf/requests_in_flight_max": float(self._most),
            }
        self._begun, self._most = now, self.total
        self._idle = self._held = self._engines = 0
        return found

    def close(self) -> None:
        """Tell the busy times that are left."""
        now = self._account()
        for engine in list(self._spells):
            self._tell(engine, now)
