"""How long a stage still takes, from the steps it has logged.

Invariant: pure; an estimate uses the last WINDOW steps only, and medians, so that neither a slow start, a restart nor
one long checkpoint moves it much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from statistics import median
from typing import Any

WINDOW = 20  #: steps that count
LARGEST = 1e18  #: no time, size or mean of a run is so large


def step_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of steps among the records of metrics.jsonl; a run that only samples has no loss."""
    return [row for row in rows if "perf/step_time" in row or "train/loss" in row]


def evaluated(row: dict[str, Any]) -> bool:
    """Whether the record is of an evaluation."""
    return any(name.startswith("eval/") for name in row)


def waited_for(row: dict[str, Any]) -> bool:
    """Whether the record is of an evaluation that the trainer has waited for: one beside the training names its policy
    version."""
    return evaluated(row) and not any(name.startswith("eval/") and name.endswith("/policy_version") for name in row)


def step_time(rows: list[dict[str, Any]]) -> float | None:
    """Median seconds of the last steps, or None if none is known.  rows: the last records of metrics.jsonl, in
    order."""
    times = [row["perf/step_time"] for row in step_rows(rows) if number(row.get("perf/step_time"))]
    return median(times[-WINDOW:]) if times else None


def pauses(rows: list[dict[str, Any]], kind: Callable[[int], object]) -> dict[object, float]:
    """Median seconds between the end of one step and the start of the next, for each kind of pause.

    kind(done): what the run does after `done` steps, such as (saves, evaluates).  The clock of the records tells.
    """
    found: dict[object, list[float]] = {}
    steps = [row for row in step_rows(rows) if number(row.get("perf/step_time")) and number(row.get("time"))]
    for before, after in pairwise(steps):
        if after["rollout_id"] == before["rollout_id"] + 1:
            pause = after["time"] - before["time"] - after["perf/step_time"]
            found.setdefault(kind(before["rollout_id"] + 1), []).append(max(0.0, pause))
    for row in rows:  # an evaluation's record tells as well, and the last one has no step after it
        own = [step for step in steps if step["rollout_id"] == row["rollout_id"]] if waited_for(row) else []
        if own and number(row.get("time")):
            found.setdefault(kind(row["rollout_id"] + 1), []).append(max(0.0, row["time"] - own[0]["time"]))
    return {what: median(times[-WINDOW:]) for what, times in found.items()}


def seconds_left(
    rows: list[dict[str, Any]], done: int, total: int, saves: int | None, evaluates: int | None, now: float
) -> float | None:
    """Seconds until step `total` is done, saved and evaluated, or None if no step is known.

    saves, evaluates: every how many steps; None for never but at the end, and never.  now: unix time; what has passed
    since the last record is taken off the first step.
    """
    each = step_time(rows)
    if each is None:
        return None
    if done >= total:
        return 0.0

    def kind(after: int) -> tuple[bool, bool]:
        end = after == total
        return end or due(after, saves), evaluates is not None and (end or due(after, evaluates))

    known = pauses(rows, kind)
    usual = known.get((False, False), 0.0)
    left = sum(each + known.get(kind(step), usual) for step in range(done + 1, total + 1))
    last = step_rows(rows)[-1].get("time")
    passed = min(each, max(0.0, now - last)) if number(last) else 0.0
    return left - passed


def due(step: int, interval: int | None) -> bool:
    return bool(interval) and step % interval == 0


def number(value: object) -> bool:
    """Whether it is a number that counts: what was not finite is logged as null, and nothing here reaches LARGEST."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    )  # false for not-a-number
