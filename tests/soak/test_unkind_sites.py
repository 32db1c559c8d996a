"""Campaigns on a cluster that is as unkind as real sites are (tests/support/unkind.py): a step that is longer
than the time limit, limits by cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.able import require
from tests.support.cluster import Cluster
from tests.support.runs import metrics, policy, sft
from tests.support.slurm import Job
from tests.support.unkind import BARE, bare, submit, trains  # noqa: F401
from tools.cluster.control import ClusterError

pytestmark = [pytest.mark.cluster, pytest.mark.soak]


def test_of_several_partitions_the_first_that_is_free(bare: Cluster, tmp_path: Path, task: Path) -> None:  # noqa: F811
    trains(submit(bare, sft(tmp_path, task, actor_num_nodes=1), tmp_path / "two", "trainer.partition=one1,one2"))


LONGER: dict[str, tuple[dict[str, object], str]] = {
    "samples": (
        {"custom_rm_path": "tests.support.slurm.very_slow", "reward_timeout": 900},
        "saved and stopped after 0 of 5 rollouts",
    ),
    "optimizer": (
        {"custom_megatron_before_train_step_hook_path": "tests.support.slurm.very_slow_step"},
        "the run did not save and end within",
    ),
}


@pytest.mark.parametrize("part", LONGER)
def test_step_longer_than_the_time_limit(
    bare: Cluster,  # noqa: F811
    tmp_path: Path,
    task: Path,
    part: str,
) -> None:
    """The run is ended, and queued again, before Slurm would end it for good; after as many starts as are allowed it
    stays down."""
    values, words = LONGER[part]
    path = policy(tmp_path, task, held_out=False, **values)
    cpu = ("trainer.partition=cpu", "engine.partition=cpu")
    job = submit(bare, path, tmp_path / "run", *cpu, "time=30", "signal_margin=60", "max_requeues=1")
    for attempt in range(2):
        trainer = job.root / f"attempts/{attempt}/peers/trainer-0.json"
        job.until(trainer.exists)
        job.limit(50)
        if not attempt:
            job.until(lambda: "queued again (1 of 1 requeues)" in said(job), 180)
            bare.run(["scontrol", "update", f"jobid={job.number}", "timelimit=30"])
    job.ends("FAILED", 180)
    assert said(job).count(words) >= 2, "at each start"
    assert "1 of 1 requeues are used up" in said(job)
    assert not metrics(job.root)


def said(job: Job) -> str:
    """What the batch process has said, on one line."""
    return " ".join((job.root / f"logs/job-{job.number}.out").read_text().split())


def test_within_limits_by_cgroups(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, task: Path) -> None:
    """Memory and devices as the job asked for them; a run that needs more than it asked for is told so."""
    require("cluster")
    try:
        limited = Cluster(
            tmp_path_factory.mktemp("limited"), visible=[tmp_path_factory.getbasetemp()], cgroups=True, nodes=2
        )
    except ClusterError as error:
        pytest.skip(f"no cluster with limits by cgroups here: {str(error).splitlines()[0]}")
    try:
        trains(submit(limited, sft(tmp_path, task), tmp_path / "run"))
    finally:
        limited.stop()
