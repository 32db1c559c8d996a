"""`hpcrl fit` says in which order shapes would start: held against queues of the test cluster that are drawn.

make soak SOAK=start_order            # ten queues; SEED=1,2,3 those; HPCRL_TABLE=FILE gets a line of each
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.drawn_queues import out_of_order, pairs_said, try_queue

pytestmark = [pytest.mark.cluster, pytest.mark.soak]
SEEDS = [int(seed) for seed in (os.environ.get("SEED") or "1,2,3,4,5,6,7,8,9,10").split(",")]
RIGHT = 0.9  #: of the queues, at least


def test_start_order_of_drawn_queues(cluster: Cluster, tmp_path: Path) -> None:
    """In nine of ten queues no two shapes start the other way round than was said."""
    right, lines = 0, []
    for seed in SEEDS:
        folder = tmp_path / str(seed)
        folder.mkdir()
        rows = try_queue(cluster, folder, seed)
        cluster.clean(60)
        wrong = out_of_order(rows, "fit")
        right += not wrong
        first = min(row.real for row in rows)
        shown = "  ".join(
            f"{row.nodes}: {row.fit - min(r.fit for r in rows):.0f} {row.real - first:.0f}" for row in rows
        )
        lines.append(
            f"seed {seed}: {pairs_said(rows, 'fit')} pairs, {len(wrong)} wrong; --test-only {pairs_said(rows, 'slurm')} "
            f"pairs, {len(out_of_order(rows, 'slurm'))} wrong; nodes: said real: {shown}"
        )
        print(lines[-1], flush=True)
    if table := os.environ.get("HPCRL_TABLE"):
        Path(table).write_text("\n".join(lines) + "\n")
    assert right >= RIGHT * len(SEEDS), "\n".join(lines)
