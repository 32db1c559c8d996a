"""How many groups to issue, and which are the next batch: the two policies of `generator.py`.  Pure; numbers in,
numbers out.

`BatchSelection` fills one batch.  As in slime, groups are issued `at_once` at a time (0: as many as are missing)
whenever those in flight and those kept would not fill the batch, and it is full as soon as enough are kept: the first
to finish.  With `ordered` (deterministic mode) it is full once the first groups in the order of their issue, refused
ones left out, are enough: then nothing depends on what finished first.

`StalenessControl` paces a loop that never waits.  A group that is issued while the engines have policy version e has no
token older than e.  The trainer learns from the next batch at version `following`, from the one after it at
`following + steps`, and so on: the group may still be in the batch that is

    place = floor((e + bound - following) / steps)

batches after the next.  Batches have `wanted` groups, so the groups that may be issued are those for which

    for every p:  groups outstanding whose place is p or less  <=  wanted * (p + 1)

holds; then there is always an order in which each is in time.  A batch is the first `wanted` finished groups, the
oldest first, as soon as the same holds of what they leave behind.  So a quick group overtakes a slow one, within the
window that the bound makes, and none is overtaken so often that it becomes too old: the batch waits for it.

Invariants of `BatchSelection`: with `ordered`, how many groups are issued, which are the batch and which were refused
for what reason depend on the verdicts alone (a group is issued only when those before it cannot fill the batch,
whatever becomes of them); a group has one verdict.  Of `StalenessControl`: every group of a batch was issued at most
`bound` versions before the trainer learns from it; no group is lost; a batch that waits waits for groups that are being
made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple


class NextBatch(NamedTuple):
    """The groups of a batch, by number, and what becomes of others.

    Attributes:
        groups: in the order of their issue.
        surplus: finished and good, not needed, and not outstanding any more.
        dropped: number -> reason, of groups that were refused.
    """

    groups: list[int]
    surplus: list[int]
    dropped: dict[int, str]


@dataclass
class BatchSelection:
    """One batch of `wanted` groups. `StalenessControl` answers to the same calls.

    Attributes:
        refused: number -> reason, of groups that are in no batch.
    """

    continuous: ClassVar[bool] = False
    wanted: int
    at_once: int
    ordered: bool
    refused: dict[int, str] = field(default_factory=dict)
    _issued: dict[int, bool | None] = field(default_factory=dict)  # in order; True kept, False refused, None in flight
    _kept: list[int] = field(default_factory=list)  # as they came
    _second: set[int] = field(default_factory=set)  # refused, but good enough where there are too few
    _decided: list[int] = field(default_factory=list)  # with `ordered`: kept, and everything before it has its verdict
    _front: list[int] = field(default_factory=list)  # issued, from the first without a verdict on, reversed

    def publish(self, version: int) -> None:
        """The engines have the weights of `version` now."""

    def request_batch(self, consumed: int, more: int) -> None:
        """The next batch is asked for; the trainer learns from it at version `consumed`, and from `more` after it."""

    def issue(self, number: int, oldest: int | None = None) -> bool:
        """The group is being made.

        Args:
            oldest: policy version of its tokens so far, None: it has none. False: with these
                it could come too late.
        """
        self._issued[number] = None
        self._front.insert(0, number)
        return True

    def keep(self, number: int) -> None:
        """It is finished, and good."""
        self._judge(number, True)
        self._kept.append(number)

    def refuse(self, number: int, reason: str, second: bool = False) -> None:
        """It is of no use.

        Args:
            second: unless there are too few of the good ones.
        """
        self._judge(number, False)
        self.refused[number] = reason
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
        return len(self._issued) - len(self._kept) - len(self.refused)

    @property
    def _good(self) -> list[int]:
        return self._decided if self.ordered else self._kept

    def due(self) -> int:
        """How many groups to issue now."""
        possible = self.in_flight + len(self._kept) + len(self._second)
        return self.at_once or self.wanted - possible if possible < self.wanted else 0

    @property
    def full(self) -> bool:
        if len(self._good) >= self.wanted:
            return True
        return not self.in_flight and len(self._kept) + len(self._second) >= self.wanted

    @property
    def missing(self) -> int:
        """Finished groups that the batch still lacks."""
        return max(0, self.wanted - len(self._good))

    def batch(self) -> NextBatch | None:
        """The next batch, if it is full."""
        if not self.full:
            return None
        first = self._good[: self.wanted]
        seconds = [number for number in self._issued if number in self._second]
        batch = [*first, *seconds[: self.wanted - len(first)]]
        chosen = set(batch)
        surplus = [number for number in self._kept if number not in chosen]
        refused = {number: reason for number, reason in self.refused.items() if number not in chosen}
        if (
            self.ordered
        ):  # what lies behind the last of the batch may have been finished or not: its verdict says nothing
            order = {number: place for place, number in enumerate(self._issued)}
            last = max(order[number] for number in batch)
            surplus += [number for number in refused if order[number] > last]
            refused = {
                number: refused[number] for number in sorted(refused, key=order.__getitem__) if order[number] <= last
            }
        return NextBatch(sorted(batch), sorted(surplus), refused)

    def took(self, batch: NextBatch) -> None:
        """The batch has been handed over."""


# ---- continuous


class OutstandingGroup(NamedTuple):
    """A group outstanding: issued, and in no batch.

    Attributes:
        oldest: policy version that its tokens have at least.
        order: of its issue.
    """

    oldest: int
    order: int
    number: int


@dataclass
class StalenessControl:
    """One batch after another out of groups that are always in flight.

    Attributes:
        wanted: groups of a batch.
        bound: policy versions that a token may lag behind.
        steps: versions that a batch makes, 1 at least.
        following: the trainer's version as it learns from the next batch.
        engines: the version that the engines have.
        more: batches after the one that was asked for last; None: any number.
    """

    continuous: ClassVar[bool] = True
    wanted: int
    bound: int
    steps: int
    following: int = 0
    engines: int = 0
    more: int | None = None
    refused: dict[int, str] = field(default_factory=dict)
    _groups: dict[int, OutstandingGroup] = field(default_factory=dict)  # by number
    _finished: set[int] = field(default_factory=set)
    _issued: int = 0

    # ---- what happens

    def publish(self, version: int) -> None:
        self.engines = max(self.engines, version)

    def request_batch(self, consumed: int, more: int) -> None:
        self.following = consumed
        self.more = more

    def issue(self, number: int, oldest: int | None = None) -> bool:
        if number in self._groups:
            raise ValueError(f"group {number} has already been issued")
        if oldest is not None and not self._admits(oldest):
            return False
        self._groups[number] = OutstandingGroup(self.engines if oldest is None else oldest, self._issued, number)
        self._issued += 1
        return True

    def keep(self, number: int) -> None:
        if number not in self._groups or number in self._finished:
            raise ValueError(f"group {number} is not being made")
        self._finished.add(number)

    def refuse(self, number: int, reason: str, second: bool = False) -> None:
        self._leave(number)
        self.refused[number] = reason

    def _leave(self, number: int) -> None:
        """It is refused, or in a batch: no more outstanding."""
        del self._groups[number]
        self._finished.discard(number)

    # ---- what to do

    def due(self) -> int:
        room = self.wanted * (self._place(self.engines) + 1)
        if self.more is not None:
            room = min(room, self.wanted * (self.more + 1))
        return max(0, room - len(self._groups))

    @property
    def missing(self) -> int:
        return max(0, self.wanted - len(self._finished))

    def batch(self) -> NextBatch | None:
        if len(self._finished) < self.wanted:
            return None
        ready = [group for group in self._in_order() if group.number in self._finished][: self.wanted]
        chosen = {group.number for group in ready}
        if self._makes_late([group for group in self._in_order() if group.number not in chosen]):
            return None
        return NextBatch([group.number for group in ready], [], dict(self.refused))

    def took(self, batch: NextBatch) -> None:
        for number in batch.groups:
            self._leave(number)
        self.refused = {}
        self.following += self.steps
        if self.more is not None:
            self.more -= 1

    # ---- looking

    def _in_order(self) -> list[OutstandingGroup]:
        return sorted(self._groups.values())

    def _place(self, oldest: int) -> int:
        """How many batches may still go before the one that a group is in at the latest; negative: it is too late for
        the next."""
        return (oldest + self.bound - self.following) // self.steps

    def _admits(self, oldest: int) -> bool:
        """Whether all that is outstanding is still in time with one group more."""
        mine = self._place(oldest)
        places = sorted([self._place(group.oldest) for group in self._groups.values()] + [mine])
        return mine >= 0 and all(
            count <= self.wanted * (place + 1) for count, place in enumerate(places, 1) if place >= mine
        )

    def _makes_late(self, left: list[OutstandingGroup]) -> bool:
        """Whether a batch leaves behind more unfinished groups, oldest first, than can be in time."""
        return any(
            group.number not in self._finished and count > self.wanted * self._place(group.oldest)
            for count, group in enumerate(left, 1)
        )
