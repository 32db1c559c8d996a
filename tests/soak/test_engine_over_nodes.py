"""One engine over two nodes of the test cluster, under Slurm: it samples and is updated; a part that dies is named and
ends the run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.runs import POLICY, metrics, recipe
from tests.support.slurm import submit

pytestmark = [pytest.mark.soak, pytest.mark.cluster]


def test_it_trains_and_ends_with_the_part_that_died(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    values = POLICY | {
        "num_rollout": 1000,
        "rollout_num_gpus": 2,
        "rollout_num_gpus_per_engine": 2,
        "save_interval": None,
    }
    values |= {"engine_start_timeout": 600, "rollout_batch_size": 2, "allow_shared_nodes": True}
    job = submit(cluster, recipe(tmp_path, task, **values), tmp_path / "run", settings=("engine.gpus_per_node=1",))
    job.until(lambda: job.steps() >= 2, seconds=480)
    for row in metrics(job.root).values():
        assert row["train/train_rollout_logprob_abs_diff"] <= 1e-4
    [engine] = json.loads((job.root / "attempts/0/plan.json").read_text())["engines"]
    [other] = engine["also"]
    assert engine["host"] != other["host"]
    [server] = [pid for pid, argv in cluster.processes(other["host"]) if "hpcrl.engine.server" in argv]
    os.kill(server, 9)
    job.ends("FAILED", seconds=120)
    error = json.loads((job.root / "attempts/0/error.json").read_text())
    assert f"engine 0, part 1 on {other['host']}: its vLLM server" in error["message"], error
