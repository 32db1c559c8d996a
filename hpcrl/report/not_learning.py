"""Runs that do not learn: a line for each reason that the metrics show.

Invariant: a line needs WINDOW steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hpcrl.report.metrics import number, step_rows
from hpcrl.report.sample_records import read_looks
from hpcrl.run.attempt_log import lowered_settings
from hpcrl.run.gpu_counters import grown_counters

_COUNT = re.compile(r"(?:rollout|eval/(.+))/reward_(?:errors|timeouts)")
_PLACE = re.compile(r" \(([^()]+:\d+) in [^()]+\)$")
#: samples that are looked through for a reason; its characters
MOST = 10_000
LONGEST = 100


def failed_gradings(stage: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for rollouts and one for evaluations, of those that had failures: how many, and where the last came from.

    Args:
        rows: records of the stage's metrics.jsonl, in order: all, or the last of them.
    """
    counts: dict[str, float] = {}
    last: dict[str, tuple[int, str | None]] = {}
    for row in rows:
        for name, failed in row.items():
            if not (match := _COUNT.fullmatch(name)) or not number(failed) or failed <= 0:
                continue
            held_out = match[1]
            what = "rollout" if held_out is None else "evaluation"
            counts[what] = counts.get(what, 0.0) + failed
            last[what] = (row["rollout_id"] + (held_out is not None), held_out)
    since = f" since step {rows[0]['rollout_id']}" if rows and rows[0]["rollout_id"] > 0 else ""
    lines = []
    for what in sorted(counts, reverse=True):
        reason = _reason(stage, *last[what])
        few = "grading" if counts[what] == 1 else "gradings"
        worth = "trained nothing" if what == "rollout" else "counted as reward 0"
        lines.append(f"{counts[what]:.0f} {what} {few} failed{since} and {worth}{f' ({reason})' if reason else ''}")
    return lines


def _reason(stage: Path, step: int, held_out: str | None) -> str:
    """The line of the user's code that raised, or what else went wrong; "" if the samples do not say."""
    looks = islice(read_looks(stage, step, held_out), MOST)
    text = next((look.record.grading_error for look in looks if look.record.grading), "")
    if match := _PLACE.search(text):
        return match[1]
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


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
    """What a reader of a stage's numbers has to know: lowered settings, failed gradings, signs that nothing is
    learned, and errors of GPUs."""
    lowered = [f"since attempt {one.attempt + 1}, step {one.step}: {one.what}" for one in lowered_settings(stage)]
    return [*lowered, *failed_gradings(stage, rows), *not_learning(rows).values(), *grown_counters(stage)]
