"""How long a run of each shape takes, what it costs, and in which order the shapes come: pure functions.

Invariant: rows are in the order of their expected end, ties by node-hours; where no start is known, of how long they
take; a row that was refused comes after all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpcrl.errors import UsageError
from hpcrl.fit.search import Candidate, FitTarget
from hpcrl.fit.shapes import RunShape
from hpcrl.memory.weight_update import LINK, predict
from hpcrl.plan import make_plan

HOUR = 3600.0


@dataclass(frozen=True)
class FitRow:
    """A shape as it is shown.

    Attributes:
        found: the shape, and what is estimated of it.
        step: seconds of a rollout and all that follows until the next; rollouts: of the run, None if that depends on
            the prompts.
        memory: GiB of a GPU at the peak; phase: in which.
        rehearsed: whether its ranks have taken a step, so that memory is counted and not estimated.
        refused: why it cannot be, "" if nothing is known.
        start: unix time at which the scheduler would start it, None if not known; told: what the scheduler said.
        note: what is to be said of it.
    """

    found: Candidate
    step: float
    rollouts: int | None
    memory: float
    phase: str
    rehearsed: bool = False
    refused: str = ""
    start: float | None = None
    told: str = ""
    note: str = ""

    @property
    def seconds(self) -> float | None:
        """Of the whole run."""
        return None if self.rollouts is None else self.rollouts * self.step

    @property
    def node_hours(self) -> float | None:
        """Of the whole run."""
        return None if self.seconds is None else self.seconds * self.found.nodes / HOUR

    @property
    def end(self) -> float | None:
        """Expected, as a unix time."""
        return None if self.start is None or self.seconds is None else self.start + self.seconds

    def facts(self) -> dict[str, Any]:
        """For programs."""
        shape, speed = self.found.shape, self.found.speed
        roles = {"trainer": speed.trainer, "engines": speed.engines}
        return {
            "nodes": self.found.nodes,
            "settings": self.found.settings,
            "engines": self.found.options.num_engines,
            "colocate": shape.shared,
            "memory_gib": round(self.memory, 2),
            "phase": self.phase,
            "rehearsed": self.rehearsed,
            "refused": self.refused,
            "tokens_per_second": {name: round(role.rate, 1) for name, role in roles.items() if role},
            "seconds_per_rollout": round(self.step, 1),
            "rollouts": self.rollouts,
            "node_hours": None if self.node_hours is None else round(self.node_hours, 1),
            "start": self.start,
            "end": self.end,
            "scheduler": self.told,
            "note": self.note,
        }


def make_rows(found: Iterable[Candidate], target: FitTarget) -> list[FitRow]:
    """A row of each, with the time that its weight updates take."""
    return [
        FitRow(one, one.speed.step(_update(one, target)), one.options.num_rollout, one.memory, one.phase)
        for one in found
    ]


def _update(one: Candidate, target: FitTarget) -> float:
    options = one.options
    if not options.num_engines or options.debug_rollout_only:
        return 0.0
    made = make_plan(options, one.request.hosts(), "fit")
    try:
        return predict(options, target.family, target.config, made, target.link or LINK).seconds
    except UsageError:  # a --weight-transfer that is not for every shape
        return 0.0


def ordered(rows: Iterable[FitRow]) -> list[FitRow]:
    """The rows in the order in which they are shown."""
    rows = list(rows)
    known = all(row.start is not None for row in rows if not row.refused)
    return sorted(rows, key=lambda row: _place(row, known))


def _place(row: FitRow, starts: bool) -> tuple[bool, float, float]:
    hours = row.node_hours if row.node_hours is not None else row.step * row.found.nodes
    length = row.seconds if row.seconds is not None else row.step
    return bool(row.refused), (row.start or 0.0) + length if starts else length, hours


def worthwhile(found: Iterable[Candidate], own: RunShape) -> list[Candidate]:
    """Candidates of which no other is faster with at most as many nodes and node-hours; and the recipe's own shape."""
    candidates = list(found)
    steps = {id(one): one.speed.step(0.0) for one in candidates}

    def worse(one: Candidate) -> bool:
        mine = steps[id(one)]
        return any(
            other.nodes <= one.nodes and steps[id(other)] < mine and steps[id(other)] * other.nodes <= mine * one.nodes
            for other in candidates
        )

    return [one for one in candidates if one.shape == own or not worse(one)]
