"""What an allocation's node-hours went into, and the bill of a run: rows for a page, a terminal or a program.  Pure:
spans and nodes in, numbers out.

A node's hour is divided over its slots (GPUs); at each moment a slot does what the busiest of its owners does
(`PRECEDENCE`), and waits where none does anything.  Before an attempt's trainer is ready, and outside of attempts, all
nodes are starting (or ending). Of an attempt, everything from the first step that a later one had to repeat is lost;
where nothing was kept, all of it.

Invariant: the costs of an allocation add up to its nodes times its length, exactly: whole microseconds are counted, and
divided as fractions.  The rows of a bill add up to the total, before they are rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from hpcrl.report.timeline.spans import COSTS, PRECEDENCE, Cost

HOUR = 3_600_000_000  #: microseconds


@dataclass(frozen=True)
class Owner:
    """A process on a node.

    Attributes:
        slots: those that it owns there.
        work: (begin, end, what it does), in microseconds, in any order.
    """

    node: str
    slots: tuple[int, ...]
    work: Sequence[tuple[int, int, Cost]]


@dataclass(frozen=True)
class AttemptSpent:
    """An attempt, in microseconds.

    Attributes:
        ready: when its trainer could work, None if it never could.
        lost: from when on its work came to nothing, None if all was kept.
        steps: of its time, in which a step was under way that was kept.
        cause: whose failure ended it, "" if it was none's.
    """

    begin: int
    end: int
    ready: int | None = None
    lost: int | None = None
    owners: Sequence[Owner] = ()
    steps: int = 0
    cause: str = ""


@dataclass(frozen=True)
class Spent:
    """Nodes that were held from `begin` to `end` (microseconds).

    Attributes:
        nodes: slots of each.
        attempts: in order, one after another.
    """

    begin: int
    end: int
    nodes: Mapping[str, int]
    attempts: Sequence[AttemptSpent] = field(default_factory=tuple)

    @property
    def total(self) -> Fraction:
        """Node-hours."""
        return Fraction((self.end - self.begin) * len(self.nodes), HOUR)


def costs(spent: Iterable[Spent]) -> dict[Cost, Fraction]:
    """Node-hours by what they went into, every cost named, over all these allocations."""
    found: dict[Cost, Fraction] = dict.fromkeys(COSTS, Fraction(0))
    for allocation in spent:
        for node, slots in allocation.nodes.items():
            for cost, time in _node(allocation, node, slots).items():
                found[cost] += Fraction(time) / HOUR
    return found


def goodput(spent: Iterable[Spent]) -> Fraction:
    """Node-hours in steps that were kept."""
    time = sum(attempt.steps * len(one.nodes) for one in spent for attempt in one.attempts)
    return Fraction(time, HOUR)


def lost_by_cause(spent: Iterable[Spent]) -> dict[str, Fraction]:
    """Node-hours that came to nothing, by whose failure that was; they add up to the cost `lost`."""
    found: dict[str, Fraction] = {}
    for one in spent:
        alone = [
            replace(one, attempts=[a if a is b else replace(b, lost=None) for b in one.attempts]) for a in one.attempts
        ]
        for attempt, part in zip(one.attempts, alone, strict=True):
            if hours := costs([part])["lost"]:
                found[attempt.cause] = found.get(attempt.cause, Fraction(0)) + hours
    return found


def _node(allocation: Spent, node: str, slots: int) -> dict[Cost, Fraction]:
    """Microseconds of one node, by cost."""
    found: dict[Cost, Fraction] = dict.fromkeys(COSTS, Fraction(0))
    at = allocation.begin
    for attempt in sorted(allocation.attempts, key=lambda attempt: attempt.begin):
        begin = min(max(attempt.begin, at), allocation.end)
        end = min(max(attempt.end, begin), allocation.end)
        lost = end if attempt.lost is None else min(max(attempt.lost, begin), end)
        ready = lost if attempt.ready is None else min(max(attempt.ready, begin), lost)
        found["starting"] += begin - at + ready - begin
        found["lost"] += end - lost
        for cost, time in _shares(attempt.owners, node, slots, ready, lost).items():
            found[cost] += time
        at = end
    found["starting"] += allocation.end - at
    return found


def _shares(owners: Sequence[Owner], node: str, slots: int, begin: int, end: int) -> dict[Cost, Fraction]:
    """Microseconds of a node from `begin` to `end`, by cost: the mean of its slots; of a node without any, its
    processes'."""
    here = [owner for owner in owners if owner.node == node]
    used = {slot for owner in here for slot in owner.slots}
    number = max(slots, len(used))
    alike: dict[tuple[int, ...], int] = {}  # slots with the same owners have the same hours
    for slot in sorted(used):
        who = tuple(n for n, owner in enumerate(here) if slot in owner.slots)
        alike[who] = alike.get(who, 0) + 1
    if number == 0:
        alike, number = {tuple(range(len(here))): 1}, 1
    elif number > len(used):
        alike[()] = number - len(used)
    found: dict[Cost, Fraction] = {}
    for who, count in alike.items():
        for cost, time in divide([piece for n in who for piece in here[n].work], begin, end).items():
            found[cost] = found.get(cost, Fraction(0)) + Fraction(time * count, number)
    return found


def divide(work: Iterable[tuple[int, int, Cost]], begin: int, end: int) -> dict[Cost, int]:
    """How long from `begin` to `end` each cost is the first of PRECEDENCE at work; the rest is waiting.  It adds up to
    the whole."""
    changes: list[tuple[int, int, int]] = []
    for start, stop, cost in work:
        start, stop = max(start, begin), min(stop, end)
        if start < stop and cost in PRECEDENCE:
            rank = PRECEDENCE.index(cost)
            changes += [(start, rank, 1), (stop, rank, -1)]
    changes.sort()
    found: dict[Cost, int] = {}
    at_work = [0] * len(PRECEDENCE)

    def account(time: int) -> None:
        cost = next((name for name, count in zip(PRECEDENCE, at_work, strict=True) if count), "waiting")
        found[cost] = found.get(cost, 0) + time

    edges = [(begin, 0, 0), *changes, (end, 0, 0)]
    for (at, rank, by), (then, _, _) in pairwise(edges):
        at_work[rank] += by
        if then > at:
            account(then - at)
    return found


# ---- the bill

#: what each cost means, for who reads the bill
MEANS: dict[Cost, str] = {
    "training": "forward and backward passes, optimizer steps",
    "generating": "engines with requests, evaluations included",
    "updating": "weights on their way, engines paused",
    "saving": "checkpoints being written",
    "waiting": "slots with nothing to do",
    "starting": "before the trainer is ready, preparing, ending",
    "lost": "repeated later, or of no use",
}


CAUSE = "of what was lost, by who failed"
KEPT = "of the total, in steps that counted"


class Row(NamedTuple):
    """One line of the bill.

    Attributes:
        hours: node-hours.
        share: of the total, as a percentage.
    """

    name: str
    hours: str
    share: str
    means: str = ""


def rows(spent: Sequence[Spent]) -> list[Row]:
    """A row a cost, and the total; none if nothing is known."""
    if not spent:
        return []
    found = costs(spent)
    total = sum(found.values())
    lines = [Row(cost, _hours(found[cost]), _share(found[cost], total), MEANS[cost]) for cost in COSTS]
    causes = sorted(lost_by_cause(spent).items(), key=lambda item: -item[1])
    lines += [Row(f"  {name or 'killed'}", _hours(hours), _share(hours, total), CAUSE) for name, hours in causes]
    most = max(len(one.nodes) for one in spent)
    held = f"{len(spent)} allocation{'s' if len(spent) > 1 else ''} of {most} node{'s' if most > 1 else ''}"
    kept = goodput(spent)
    return [
        *lines,
        Row("total", _hours(total), _share(total, total), held),
        Row("goodput", _hours(kept), _share(kept, total), KEPT),
    ]


def _hours(hours: Fraction | int) -> str:
    value = float(hours)
    return f"{value:.2f}" if value >= 10 else f"{value:.4f}"


def _share(part: Fraction | int, total: Fraction | int) -> str:
    return f"{100 * float(part / total):.1f} %" if total else "-"


def as_numbers(spent: Sequence[Spent]) -> dict[str, Any]:
    """For programs: node-hours by cost, their total, each allocation (unix times, nodes with their slots), those that
    were lost by who failed, and the share of the total in steps that counted."""
    found = {cost: float(hours) for cost, hours in costs(spent).items()}
    held = [
        {"begin": one.begin / 1e6, "end": one.end / 1e6, "nodes": dict(one.nodes), "node_hours": float(one.total)}
        for one in spent
    ]
    lost = {name or "killed": float(hours) for name, hours in lost_by_cause(spent).items()}
    total = sum(one.total for one in spent)
    more = {"lost": lost, "goodput": float(goodput(spent) / total) if total else 0.0}
    return {"node_hours": found, "total": float(total), "allocations": held, **more}


def text(lines: Sequence[Row]) -> str:
    """The bill as a table of plain text."""
    head = Row("", "NODE-HOURS", "SHARE")
    wide = max(len(row.hours) for row in [head, *lines])
    return "\n".join(
        f"{row.name:12}{row.hours:>{wide}}  {row.share:>8}  {row.means}".rstrip() for row in [head, *lines]
    )
