"""What the sandboxes of a run did in its last step, in a line, from metrics.jsonl alone; and their hours.

Invariant: of a run without sandboxes nothing is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from hpcrl.report.metrics import number, step_rows
from hpcrl.report.timeline.reading import Track
from hpcrl.report.timeline.spans import SANDBOXES
from hpcrl.sandbox.accounts import CAUSES

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


# ---- their hours, from timelines alone


def sandbox_use(tracks: Iterable[Track]) -> dict[str, float]:
    """Over all attempts: seconds that sandboxes were `used`, `warm` and `making` and that callers `waited`, those that
    were `made` and `handed_out`, and failures by cause; {} where there were none.  Of a process that was killed, up to
    the last rollout that it has made."""
    found: Counter[str] = Counter()
    for track in tracks:
        if marks := [*track.named(SANDBOXES)]:
            found.update({name: value for name, value in marks[-1].more.items() if number(value)})
    return {name: float(value) for name, value in found.items()}


def sandbox_hours(use: dict[str, float]) -> str:
    """It in words, in hours of one sandbox; "" where there were none."""
    if not use:
        return ""
    get = use.get
    used, idle, waited = (get(name, 0.0) / 3600 for name in ("used", "warm", "waited"))
    share = f" ({100 * idle / (idle + used):.1f} % of them)" if idle + used else ""
    failures = Counter({cause: round(get(cause, 0.0)) for cause in CAUSES})
    return (
        f"sandbox-hours: {used:.4f} in use, {idle:.4f} made ahead and idle{share}; {get('made', 0):.0f} were made, "
        f"{get('handed_out', 0):.0f} handed out after waits of {waited:.4f} hours in all{failed_by_cause(failures)}"
    )
