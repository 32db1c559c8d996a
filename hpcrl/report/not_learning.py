"""Runs that do not learn: a line for each reason that the metrics show.

Invariant: a line needs WINDOW steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcrl.report.failed_gradings import failed_gradings
from hpcrl.report.metrics import number, step_rows

WINDOW = 10  #: steps that are looked at, the last ones
NEARLY_ALL = 0.95
UNKNOWN = 0.05  #: share of the prompts' tokens

#: metric -> (whether its value in each of the steps is bad, what to say of the mean of the values)
SIGNS: dict[str, tuple[Callable[[float], bool], str]] = {
    "rollout/zero_std": (
        lambda value: value >= NEARLY_ALL,
        "{:.0%} of groups had equal rewards, so nothing is learned: hpcrl samples RUN",
    ),
    "rollout/truncated_ratio": (
        lambda value: value >= NEARLY_ALL,
        "{:.0%} of responses were cut at the limit of their length: hpcrl samples RUN --truncated",
    ),
    "rollout/unknown_ratio": (
        lambda value: value > UNKNOWN,
        "{:.0%} of the prompts' tokens were unknown to the tokenizer: hpcrl samples RUN",
    ),
    "train/grad_norm": (lambda value: value == 0.0, "the gradient was exactly {:.0f}: hpcrl samples RUN"),
}


def not_learning(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Metric -> line.

    Args:
        rows: records of metrics.jsonl, in order.
    """
    last = step_rows(rows)[-WINDOW:]
    found = {}
    for metric, (bad, text) in SIGNS.items():
        values = [row[metric] for row in last if number(row.get(metric))]
        if len(values) == WINDOW and all(map(bad, values)):
            found[metric] = f"in the last {WINDOW} steps {text.format(sum(values) / WINDOW)}"
    return found


def notes_of(stage: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader of a stage's numbers has to know: failed gradings, and signs that nothing is learned."""
    return [*failed_gradings(stage, rows), *not_learning(rows).values()]
