"""How a batch fills: how many groups to issue, when it is full, which groups it is.  Pure; numbers in, numbers out.

As slime has it, groups are issued `at_once` at a time whenever those in flight and those kept would not fill the batch,
and it is full as soon as enough are kept: the first to finish.  With `ordered` (deterministic mode) it is full once the
first groups in the order of their issue, refused ones left out, are enough: then nothing depends on what finished
first.

Invariants: with `ordered`, how many groups are issued, which are the batch and which were refused for what reason
depend on the verdicts alone (a group is issued only when those before it cannot fill the batch, whatever becomes of
them); a group has one verdict.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Outcome:
    """batch: in order of number; surplus: finished, good, not needed; refused: number -> reason."""

    batch: list[int]
    surplus: list[int]
    refused: dict[int, str]


@dataclass
class Filling:
    """One batch of `wanted` groups."""

    wanted: int
    at_once: int
    ordered: bool
    _issued: dict[int, bool | None] = field(default_factory=dict)  # in order; True kept, False refused, None in flight
    _kept: list[int] = field(default_factory=list)  # as they came
    _refused: dict[int, str] = field(default_factory=dict)
    _second: set[int] = field(default_factory=set)  # refused, but good enough where there are too few
    _decided: list[int] = field(default_factory=list)  # with `ordered`: kept, and everything before it has its verdict
    _front: list[int] = field(default_factory=list)  # issued, from the first without a verdict on, reversed

    def add(self, numbers: Iterable[int]) -> None:
        """These are in flight now."""
        new = list(numbers)
        self._issued |= dict.fromkeys(new)
        self._front = [*reversed(new), *self._front]

    def keep(self, number: int) -> None:
        """It is finished, and good."""
        self._judge(number, True)
        self._kept.append(number)

    def refuse(self, number: int, reason: str, second: bool = False) -> None:
        """It is of no use; second: unless there are too few of the good ones."""
        self._judge(number, False)
        self._refused[number] = reason
        if second:
            self._second.add(number)

    def _judge(self, number: int, good: bool) -> None:
        if self._issued.get(number, good) is not None:
            raise ValueError(f"group {number} is not in flight for this batch")
        self._issued[number] = good
        while self._front and (verdict := self._issued[self._front[-1]]) is not None:
            first = self._front.pop()
            if verdict:
                self._decided.append(first)

    @property
    def in_flight(self) -> int:
        return len(self._issued) - len(self._kept) - len(self._refused)

    @property
    def _good(self) -> list[int]:
        return self._decided if self.ordered else self._kept

    def due(self) -> int:
        """How many groups to issue now."""
        possible = self.in_flight + len(self._kept) + len(self._second)
        return self.at_once if possible < self.wanted else 0

    @property
    def full(self) -> bool:
        if len(self._good) >= self.wanted:
            return True
        return not self.in_flight and len(self._kept) + len(self._second) >= self.wanted

    @property
    def missing(self) -> int:
        """Groups that the batch still lacks."""
        return max(0, self.wanted - len(self._good))

    def outcome(self) -> Outcome:
        """What the batch is, once it is full."""
        first = self._good[: self.wanted]
        seconds = [number for number in self._issued if number in self._second]
        batch = [*first, *seconds[: self.wanted - len(first)]]
        chosen = set(batch)
        surplus = [number for number in self._kept if number not in chosen]
        refused = {number: reason for number, reason in self._refused.items() if number not in chosen}
        if (
            self.ordered
        ):  # what lies behind the last of the batch may have been finished or not: its verdict says nothing
            order = {number: place for place, number in enumerate(self._issued)}
            last = max(order[number] for number in batch)
            surplus += [number for number in refused if order[number] > last]
            refused = {
                number: refused[number] for number in sorted(refused, key=order.__getitem__) if order[number] <= last
            }
        return Outcome(sorted(batch), sorted(surplus), refused)
