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

    After one evaluation alone there is one number; means outside of 0 to 1 are no accuracy, but a mean reward.  directory: the stage whose evaluations count; root: the run.
    """
    where, points = _shown(root), held_out(directory)
    if not points:
        return f"finished  {where}"
    values = [f"{points[i][1]:.2f}" for i in ((0, -1) if len(points) > 1 else (0,))]
    name = "accuracy" if all(0 <= value <= 1 for _, value in points) else "mean reward"
    return f"held-out {name}: {' -> '.join(values)}  {where}"


def what_next(root: Path) -> str:
    """The commands that go on from a finished run."""
    run = _shown(root)
    return (
        f"to look at it: hpcrl report {run}, hpcrl samples {run}; to export it: hpcrl convert to-hf {run}; "
        f"to train on: hpcrl resume {run} --num-rollout N"
    )


def _shown(root: Path) -> str:
    where = os.path.relpath(root)
    return str(root) if where.startswith("..") else where
