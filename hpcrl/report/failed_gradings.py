"""Gradings that failed: how many, and where the last of them did.

Samples of rollouts then train nothing; held-out ones count with reward 0, so the means of an evaluation are only as
good as these counts are small.

Invariant: the counts come from metrics.jsonl, the place from the samples of the last record that has any; nothing else
is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hpcrl.report.metrics import number

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
        for held_out, failed in _failures(row):
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


def _failures(row: dict[str, Any]) -> Iterator[tuple[str | None, float]]:
    """(held-out set, or None for a rollout, failures) of each count of a record that is not 0."""
    for name, value in row.items():
        if (match := _COUNT.fullmatch(name)) and number(value) and value > 0:
            yield match[1], value


def _reason(stage: Path, step: int, held_out: str | None) -> str:
    """The line of the user's code that raised, or what else went wrong; "" if the samples do not say."""
    from hpcrl.report.sample_records import read_looks  # which takes numpy, too heavy for a run without failures

    looks = islice(read_looks(stage, step, held_out), MOST)
    text = next((look.record.grading_error for look in looks if look.record.grading), "")
    if match := _PLACE.search(text):
        return match[1]
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
