"""How busy the engines are: requests in flight of each, who has fewest, and how the load went over time.

Invariants: what a change or a question costs does not grow with the number of engines; pure but for the clock that
`Occupancy` is given; all sums are of integers, so that nothing drifts in a long run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable


class Loads:
    """Requests in flight of every living engine, by its number.

    Attributes:
        occupancy: is told of every change.
    """

    def __init__(self, occupancy: Occupancy | None = None) -> None:
        self._occupancy = occupancy
        self._of: dict[int, int] = {}
        self._at: defaultdict[int, dict[int, None]] = defaultdict(dict)
        self._least = 0
        self.total = 0

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, member: int) -> bool:
        return member in self._of

    def __getitem__(self, member: int) -> int:
        return self._of[member]

    def add(self, member: int) -> None:
        """One more engine, with nothing in flight."""
        self._of[member] = 0
        self._at[0][member] = None
        self._least = 0
        if self._occupancy is not None:
            self._occupancy.add(member)

    def drop(self, member: int) -> None:
        """An engine that is no more; asked for twice, the second time does nothing."""
        if (load := self._of.pop(member, None)) is not None:
            del self._at[load][member]
            self.total -= load
            if self._occupancy is not None:
                self._occupancy.drop(member)

    def move(self, member: int, by: int) -> None:
        """`by` more requests in flight (or, negative, fewer); nothing for an engine that was dropped."""
        if (load := self._of.get(member)) is None:
            return
        del self._at[load][member]
        load += by
        assert load >= 0, f"engine {member} has {load} requests in flight"
        self._of[member] = load
        self._at[load][member] = None
        self.total += by
        self._least = min(self._least, load)
        if self._occupancy is not None:
            self._occupancy.set(member, load)

    def least(self) -> int:
        """The engine with fewest in flight; of several, the one that has been there longest.  LookupError without
        any."""
        if not self._of:
            raise LookupError("no engine")
        while not self._at.get(self._least):
            self._at.pop(self._least, None)
            self._least += 1
        return next(iter(self._at[self._least]))


SAME = (
    100_000  #: microseconds: an engine that has requests again within this time was busy throughout, for the timeline
)


class Occupancy:
    """Of engines that may have `limit` requests each.

    Attributes:
        clock: microseconds that never go back.
        busy: is told (engine, begin, end) of each time in which an engine had requests.
    """

    def __init__(
        self, limit: int, clock: Callable[[], int], busy: Callable[[int, int, int], None] = lambda *_: None
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._busy = busy
        self._load: dict[int, int] = {}
        self._spell: dict[
            int, tuple[int, int | None]
        ] = {}  # (begin, end) of the last busy time; end None while it lasts
        self._working = 0  # engines with requests
        self.in_flight = 0
        self._begin_window()

    def _begin_window(self) -> None:
        self._begun = self._at = self._clock()
        self._idle = self._held = self._engines = 0  # integrals over time: idle engines, requests, engines
        self._most = self.in_flight

    def add(self, engine: int) -> None:
        """One more engine, without requests."""
        self._account()
        self._load.setdefault(engine, 0)

    def drop(self, engine: int) -> None:
        """An engine that is no more."""
        if engine in self._load:
            self.set(engine, 0)
            self._close(engine)
            del self._load[engine]

    def set(self, engine: int, load: int) -> None:
        """It has so many requests from now on; nothing for an engine that is not there."""
        before = self._load.get(engine)
        if before is None or load == before:
            return
        now = self._account()
        self._load[engine] = load
        self.in_flight += load - before
        self._most = max(self._most, self.in_flight)
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

    def _account(self) -> int:
        """Bring the integrals up to now."""
        now = self._clock()
        passed = now - self._at
        self._at = now
        self._idle += passed * (len(self._load) - self._working)
        self._held += passed * self.in_flight
        self._engines += passed * len(self._load)
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
