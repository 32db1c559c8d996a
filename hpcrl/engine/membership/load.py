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
        #: (begin, end) of the last busy time; end None while it lasts
        self._spell: dict[int, tuple[int, int | None]] = {}
        self._working = 0  # engines with requests
        self.total = 0
        self._begin_window()

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
            self._set(engine, 0)
            self._account()
            self._close(engine)
            del self._of[engine]

    def move(self, engine: int, by: int) -> None:
        """`by` more requests in flight (or, negative, fewer); nothing for an engine that is not there."""
        if engine in self._of:
            load = self._of[engine] + by
            assert load >= 0, f"engine {engine} has {load} requests in flight"
            self._set(engine, load)

    def least(self) -> int:
        """The engine with fewest in flight; of several, the one that has been there longest."""
        return min(self._of, key=self._of.__getitem__)

    def _set(self, engine: int, load: int) -> None:
        before = self._of[engine]
        if load == before:
            return
        now = self._account()
        self._of[engine] = load
        self.total += load - before
        self._most = max(self._most, self.total)
        if before == 0:
            self._working += 1
            begin, end = self._spell.get(engine, (now, now))
            if end is not None and now - end > SAME:
                self._close(engine)
                begin = now
            self._spell[engine] = (begin, None)
        elif load == 0:
            self._working -= 1
            self._spell[engine] = (self._spell[engine][0], now)

    # ---- over time

    def _begin_window(self) -> None:
        self._begun = self._then = self._clock()
        self._idle = self._held = self._engines = 0  # integrals over time: idle engines, requests, engines
        self._most = self.total

    def _account(self) -> int:
        """Bring the integrals up to now."""
        now = self._clock()
        passed = now - self._then
        self._then = now
        self._idle += passed * (len(self._of) - self._working)
        self._held += passed * self.total
        self._engines += passed * len(self._of)
        return now

    def _close(self, engine: int) -> None:
        begin, end = self._spell.pop(engine, (0, 0))
        if end is not None and end > begin:
            self._busy(engine, begin, end)

    def measures(self) -> dict[str, float]:
        """Since the last call: the share of the engines' time without any request, their requests as a share of what
        they may have, and requests in flight; nothing where there was no engine.  Busy times are told up to now.
        """
        now = self._account()
        for engine, (begin, end) in list(self._spell.items()):
            if end is None:
                self._spell[engine] = (begin, now)
                self._close(engine)
                self._spell[engine] = (now, None)
            elif now - end > SAME:
                self._close(engine)
        found: dict[str, float] = {}
        if self._engines:
            found = {
                "perf/engine_idle_ratio": self._idle / self._engines,
                "perf/engine_occupancy": self._held / (self._engines * self._limit),
                "perf/requests_in_flight": self._held / (now - self._begun),
                "perf/requests_in_flight_max": float(self._most),
            }
        self._begin_window()
        return found

    def close(self) -> None:
        """Tell the busy times that are left."""
        now = self._account()
        for engine, (begin, end) in list(self._spell.items()):
            self._spell[engine] = (begin, now if end is None else end)
            self._close(engine)
