"""The last line of a run: held-out accuracy before and after, and where the run lies.

Invariant: the numbers come from metrics.jsonl and from nowhere else.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpcrl.report.metrics import read_metrics


def held_out(directory: Path) -> list[tuple[int, float]]:
    """(rollout id, mean accuracy over the held-out sets) of every evaluation, in order."""
    found = []
    for row in read_metrics(directory / "metrics.jsonl"):
        values = [v for k, v in row.items() if k.startswith("eval/") and k.endswith("/accuracy")]
        if values:
            found.append((row["rollout_id"], sum(values) / len(values)))
    return found


def closing_line(directory: Path, root: Path) -> str:
    """`held-out accuracy: 0.41 -> 0.83  runs/...`, or where the run lies if nothing was evaluated.

    directory: the stage whose evaluations count; root: the run.
    """
    where = os.path.relpath(root)
    where = str(root) if where.startswith("..") else where
    points = held_out(directory)
    if not points:
        return f"finished  {where}"
    return f"held-out accuracy: {points[0][1]:.2f} -> {points[-1][1]:.2f}  {where}"
