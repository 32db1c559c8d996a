"""Campaigns on a cluster that is as unkind as real sites are (tests/support/unkind.py): the whole quick start, a file
system that remembers for a minute what it saw, a step that is longer than the time limit, limits by cgroups.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.able import require
from tests.support.children import read_line
from tests.support.cluster import Cluster
from tests.support.runs import REPO, metrics, policy, rows, sft
from tests.support.slurm import ENV, Job
from tests.support.unkind import BARE, bare, submit, trains  # noqa: F401
from tests.whole_runs.test_unkind_sites import guides_command
from tools.cluster.control import ClusterError

pytestmark = [pytest.mark.cluster, pytest.mark.soak]


@pytest.fixture
def cached(bare: Cluster, tmp_path: Path) -> Iterator[Path]:  # noqa: F811
    """A directory that every host sees through a mount of its own, which remembers names, attributes and absence for 60
    s."""
    real, seen = tmp_path / "real", tmp_path / "runs"
    real.mkdir()
    seen.mkdir()
    command = [sys.executable, "-m", "tools.cluster.caching_mount", real, seen, "60"]
    mounts = [bare.popen(command, host, env={"PYTHONPATH": str(REPO)}) for host in bare.hosts]
    try:
        assert [read_line(mount) for mount in mounts] == ["ready\n"] * len(mounts)
        yield seen
    finally:
        for host, mount in zip(bare.hosts, mounts, strict=True):
            bare.run(["umount", "-l", seen], host, check=False)
            mount.kill()
            mount.wait(10)


def test_of_several_partitions_the_first_that_is_free(bare: Cluster, tmp_path: Path, task: Path) -> None:  # noqa: F811
    trains(submit(bare, sft(tmp_path, task, actor_num_nodes=1), tmp_path / "two", "trainer.partition=one1,one2"))


def test_quick_start_with_a_cache_of_a_minute(
    bare: Cluster,  # noqa: F811
    cached: Path,
    tmp_path: Path,
) -> None:
    """The whole quick start over three hosts whose file system caches for a minute."""
    (tmp_path / "mine.toml").write_text('[trainer]\npartition = "cpu"\n[engine]\npartition = "cpu"\n')
    shown = bare.run(guides_command(), env=ENV | {"HPCRL_SITE": str(tmp_path / "mine.toml")}, cwd=cached).stdout
    root = Path(re.search(r"run directory: (\S+)", shown)[1]).relative_to(cached)
    job = Job(bare, tmp_path / "real" / root, int(re.match(r"job (\d+)", shown)[1]))  # looked at without the cache
    job.ends(seconds=1500)
    before, after = re.search(
        r"held-out accuracy: (\S+) -> (\S+) ", (job.root / f"logs/job-{job.number}.out").read_text()
    ).groups()
    assert float(after) >= float(before) + 0.25


def test_mount_caches_absence(bare: Cluster, cached: Path) -> None:  # noqa: F811
    """The mount caches absence for a minute and lists what is there."""
    file = cached / "later"
    assert bare.run(["test", "-e", file], "node2", check=False).returncode == 1
    bare.run(["touch", file], "node1")
    assert bare.run(["test", "-e", file], "node2", check=False).returncode == 1, "or else the test below shows nothing"
    assert bare.run(["ls", cached], "node2").stdout == "later\n"


def test_grpo_with_a_cache_of_a_minute(
    bare: Cluster,  # noqa: F811
    cached: Path,
    tmp_path: Path,
    task: Path,
) -> None:
    """GRPO over three hosts whose file system caches for a minute."""
    job = submit(
        bare, policy(tmp_path, task, held_out=False), cached / "run", "trainer.partition=cpu", "engine.partition=cpu"
    )
    job.root = tmp_path / "real" / "run"  # looked at without the cache
    trains(job, 5)
    spent = [row["perf/step_time"] for row in rows(job.root) if "perf/step_time" in row]
    assert max(spent) < 50, f"no step waits for a cache to forget: {spent}"


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
    path = policy(tmp_path, task, held_out=False, rollout_timeout=900, **values)
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
