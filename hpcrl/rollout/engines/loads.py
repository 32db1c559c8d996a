"""How busy each of many engines is, and which is least so.

Invariant: what a question costs does not grow with the number of engines.
"""

from __future__ import annotations

from collections import defaultdict

from hpcrl.rollout.engines.occupancy import Occupancy


class Loads:
    """Requests in flight of every living engine, by its number.  occupancy: is told of every change."""

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
