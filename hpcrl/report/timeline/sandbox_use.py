"""The hours of a run's sandboxes.

Invariant: from timelines alone; of a run without sandboxes nothing is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hpcrl.report.metrics import number
from hpcrl.report.sandbox_line import failed_by_cause
from hpcrl.report.timeline.reading import Track
from hpcrl.report.timeline.spans import SANDBOXES
from hpcrl.sandbox.accounts import CAUSES


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
