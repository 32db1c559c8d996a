"""Engines that join a running Slurm job from a job of their own, and are preempted there, while the run trains on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcrl.run.engine_files import read_views
from tests.support.cluster import Cluster
from tests.support.ledger_account import account
from tests.support.runs import POLICY, metrics, recipe
from tests.support.slurm import Job, hpcrl, submit

pytestmark = [pytest.mark.cluster, pytest.mark.soak]


def states(job: Job) -> list[str]:
    views = read_views(job.root / "attempts/0")
    return [view.state for view in views.engines] if views else []


def on(job: Job, index: int) -> str:
    views = read_views(job.root / "attempts/0")
    assert views is not None
    return views.engines[index].host


def test_join_preempt_and_leave(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """Engines of another job join, are preempted and leave."""
    values = {"num_rollout": 100000, "save_interval": None, "actor_num_nodes": 1, "actor_num_gpus_per_node": 1}
    values |= {"deterministic_mode": False}  # so that responses of a preempted engine go on elsewhere from their tokens
    job = submit(cluster, recipe(tmp_path, task, **(POLICY | values)), tmp_path / "run")
    job.until(lambda: job.steps() >= 1)
    more = [
        "--time",
        "20",
        "--set",
        "engine.partition=low",
        "--set",
        "requeue=false",
        "--set",
        "exclusive=true",
    ]  # a node of its own
    said = hpcrl(cluster, "engines", "add", job.root, *more).stdout
    number = int(re.match(r"job (\d+)", said)[1])
    job.until(lambda: states(job) == ["serving", "serving"])
    assert on(job, 1) != on(job, 0)
    listed = hpcrl(cluster, "engines", job.root).stdout
    assert len(re.findall(r"^[01] +serving", listed, re.M)) == 2, listed
    steps = job.steps()
    job.until(lambda: job.steps() >= steps + 3)
    strong = cluster.sbatch("-p", "main", f"--nodelist={on(job, 1)}", "--exclusive", "--wrap", "sleep 3")
    job.until(lambda: states(job)[1] in ("gone", "suspect", "ended"))
    cluster.wait_state(strong, "COMPLETED", 60)
    log = (job.root / "logs/attempt-0/rollout-0.log").read_text()
    assert re.search(r"engine-1 on \w+ hands \d+ responses back", log), log
    steps = job.steps()
    job.until(lambda: job.steps() >= steps + 3)
    assert not {"RUNNING", "PENDING"} & set(cluster.states(number).values()), "it was cancelled, not requeued"
    hpcrl(cluster, "engines", "add", job.root, *more)
    job.until(lambda: states(job)[2:] == ["serving"])
    hpcrl(cluster, "engines", "remove", job.root, "2")
    job.until(lambda: states(job)[2:] == ["gone"])
    hpcrl(cluster, "stop", job.root)
    job.ends("FAILED")  # with 143: stopped, and saved
    rows = metrics(job.root)
    assert list(rows) == list(range(len(rows)))
    assert all(row["train/train_rollout_logprob_abs_diff"] <= 1e-5 for row in rows.values())
    found = account(job.root)
    assert not found.wrong and found.trained == len(rows) * POLICY["rollout_batch_size"]
    assert job.attempt() == 0
