"""What the sandboxes of a run did in its last step, in a line.

Invariant: from metrics.jsonl alone; of a run without sandboxes nothing is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hpcrl.report.metrics import number, step_rows

_FAILURES = "sandbox/failures/"


def sandbox_line(rows: Sequence[dict[str, Any]]) -> str:
    """How many were in which state in the last step, how long callers waited, and failures of all steps by cause; ""
    where there are no sandboxes.

    Args:
        rows: records of metrics.jsonl, in order: all, or the last of them.
    """
    steps = [row for row in step_rows(rows) if number(row.get("sandbox/used"))]
    if not steps:
        return ""
    get = {name.removeprefix("sandbox/"): value for name, value in steps[-1].items() if number(value)}.get
    text = f"{get('used', 0):.1f} in use, {get('warm', 0):.1f} warm, {get('making', 0):.1f} being made"
    text += f"; {get('wait_time', 0.0):.2g} s until one is ready"
    failures: Counter[str] = Counter()
    for row in steps:
        for name, value in row.items():
            if name.startswith(_FAILURES) and number(value):
                failures[name.removeprefix(_FAILURES)] += round(value)
    since = f" since step {steps[0]['rollout_id']}" if rows[0]["rollout_id"] > 0 else ""
    return f"{text}{failed_by_cause(failures)}{since if failures.total() else ''}"


def failed_by_cause(failures: Counter[str]) -> str:
    """Failures in words, the most frequent cause first; "" for none."""
    known = [f"{count} {cause}" for cause, count in failures.most_common() if count]
    return f"; failures: {', '.join(known)}" if known else ""
