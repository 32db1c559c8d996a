"""The bill of a run: what its node-hours went into, as rows for a page, a terminal or a program.

Invariant: the rows add up to the total, before they are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from hpcrl.report.timeline.accounting import Spent, costs
from hpcrl.report.timeline.names import COSTS, Cost

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


class Row(NamedTuple):
    """hours: node-hours; share: of the total, as a percentage."""

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
    most = max(len(one.nodes) for one in spent)
    held = f"{len(spent)} allocation{'s' if len(spent) > 1 else ''} of {most} node{'s' if most > 1 else ''}"
    return [*lines, Row("total", _hours(total), _share(total, total), held)]


def _hours(hours: Fraction | int) -> str:
    value = float(hours)
    return f"{value:.2f}" if value >= 10 else f"{value:.4f}"


def _share(part: Fraction | int, total: Fraction | int) -> str:
    return f"{100 * float(part / total):.1f} %" if total else "-"


def as_numbers(spent: Sequence[Spent]) -> dict[str, Any]:
    """For programs: node-hours by cost, their total, and each allocation (unix times, nodes with their slots)."""
    found = {cost: float(hours) for cost, hours in costs(spent).items()}
    held = [
        {"begin": one.begin / 1e6, "end": one.end / 1e6, "nodes": dict(one.nodes), "node_hours": float(one.total)}
        for one in spent
    ]
    return {"node_hours": found, "total": float(sum(one.total for one in spent)), "allocations": held}


def text(lines: Sequence[Row]) -> str:
    """The bill as a table of plain text."""
    head = Row("", "NODE-HOURS", "SHARE")
    wide = max(len(row.hours) for row in [head, *lines])
    return "\n".join(
        f"{row.name:12}{row.hours:>{wide}}  {row.share:>8}  {row.means}".rstrip() for row in [head, *lines]
    )
