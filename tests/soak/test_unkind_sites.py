"""Runs on a cluster that is as unkind as real sites are: no GPUs and no generic resources, no default partition, partitions of one node,
an environment that Slurm is told not to hand on, set-up lines that fail under `set -u`, a home that cannot be written to, scratch
that differs by node, a submission from inside another job, and a file system that remembers for a minute what it saw.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.runs import POLICY, REPO, SFT, metrics, recipe, rows
from tests.support.slurm import ENV, Job, hpcrl
from tools.cluster import packages

pytestmark = [pytest.mark.cluster, pytest.mark.soak]
SPREAD = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1}
BARE = ("trainer.gpus_per_node=0", "trainer.mem=4G", "trainer.cpus_per_node=2", "engine.gpus_per_node=0", "engine.mem=4G")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if lacking := packages.reason():
        pytest.skip(f"no test cluster here: {lacking}")
    running = Cluster(tmp_path_factory.mktemp("bare"), visible=[tmp_path_factory.getbasetemp()], bare=True, nodes=3)
    yield running
    running.stop()


@pytest.fixture
def cached(bare: Cluster, tmp_path: Path) -> Iterator[Path]:
    """A directory that every host sees through a mount of its own, which remembers names, attributes and absence for 60 s."""
    real, seen = tmp_path / "real", tmp_path / "runs"
    real.mkdir()
    seen.mkdir()
    command = [sys.executable, "-m", "tools.cluster.caching_mount", real, seen, "60"]
    mounts = [bare.popen(command, host, env={"PYTHONPATH": str(REPO)}) for host in bare.hosts]
    try:
        assert [mount.stdout.readline() for mount in mounts] == ["ready\n"] * len(mounts)
        yield seen
    finally:
        for host, mount in zip(bare.hosts, mounts, strict=True):
            bare.run(["umount", "-l", seen], host, check=False)
            mount.kill()
            mount.wait(10)


def sft(path: Path, task: Path, **values: object) -> Path:
    path.mkdir(exist_ok=True)
    return recipe(path, task, **(SFT | SPREAD | values))


def policy(path: Path, task: Path, **values: object) -> Path:
    path.mkdir(exist_ok=True)
    return recipe(path, task, **(POLICY | SPREAD | values))


def submit(cluster: Cluster, file: Path, root: Path, *settings: str, **more: str) -> Job:
    words = ["submit", file, "--run-dir", root, "--set", *BARE, *settings]
    command = [sys.executable, "-m", "hpcrl", *words]
    done = cluster.run(command, env=ENV | more, timeout=120)
    return Job(cluster, root, int(re.match(r"job (\d+)", done.stdout)[1]))


def trains(job: Job, steps: int = 6) -> None:
    job.ends()
    assert list(metrics(job.root)) == list(range(steps)), job.logs()


def test_a_partition_without_gpus_and_of_several_the_first_that_is_free(bare: Cluster, tmp_path: Path, task: Path) -> None:
    job = submit(bare, sft(tmp_path, task), tmp_path / "run", "trainer.partition=cpu")
    trains(job)
    script = (job.root / "job.sbatch").read_text()
    assert "--gpus" not in script and "--gres" not in script
    trains(submit(bare, sft(tmp_path, task, actor_num_nodes=1), tmp_path / "two", "trainer.partition=one1,one2"))


def test_without_a_default_partition_the_mend_is_named_before_the_queue(bare: Cluster, tmp_path: Path, task: Path) -> None:
    done = hpcrl(bare, "submit", sft(tmp_path, task), "--run-dir", tmp_path / "run", "--set", *BARE, check=False)
    assert done.returncode == 2 and "partition" in done.stderr and not (tmp_path / "run").exists(), done.stderr
    looked = hpcrl(bare, "doctor", sft(tmp_path, task), "--run-dir", tmp_path / "run", "--set", *BARE, check=False, timeout=120)
    assert "set trainer.partition; there are cpu, one1, one2, one3" in looked.stdout


def test_a_partition_of_one_node_is_too_small_and_says_so(bare: Cluster, tmp_path: Path, task: Path) -> None:
    words = ["submit", sft(tmp_path, task), "--run-dir", tmp_path / "run", "--set", *BARE, "trainer.partition=one1"]
    done = hpcrl(bare, *words, check=False)
    assert done.returncode == 2 and "trainer.partition one1: 2 nodes with 2 CPUs asked for, 1 of its 1 are so" in done.stderr, (
        done.stderr
    )


def test_whatever_the_sites_environment_is(bare: Cluster, tmp_path: Path, task: Path) -> None:
    """Slurm hands nothing on, the set-up reads what is not set and ends badly, home is read-only, scratch differs by node."""
    (tmp_path / "site.toml").write_text(
        'setup = ["echo $CONDA_BACKUP_NOT_SET", "false", "export SCRATCH_HERE=/tmp/scratch-$SLURMD_NODENAME", '
        '"mkdir -p $SCRATCH_HERE"]\nscratch = "$SCRATCH_HERE"\n[env]\n'
        + "".join(f"{name} = {json.dumps(value)}\n" for name, value in ENV.items())
        + '[trainer]\npartition = "cpu"\n'
    )
    for node in bare.nodes:
        bare.run("mkdir -p /tmp/home && mount -t tmpfs -o ro tmpfs /tmp/home", node)
        bare.run("mkdir -p /tmp/scratch-node1", node)
    hostile = {
        "SBATCH_EXPORT": "NONE",
        "SLURM_EXPORT_ENV": "NONE",
        "HPCRL_SITE": str(tmp_path / "site.toml"),
        "HOME": "/tmp/home",
    }
    try:
        trains(submit(bare, sft(tmp_path, task), tmp_path / "run", **hostile))
    finally:
        for node in bare.nodes:
            bare.run("umount /tmp/home", node)


def test_from_inside_another_job(bare: Cluster, tmp_path: Path, task: Path) -> None:
    """The outer job's size, memory and identity are not the new one's."""
    words = [sys.executable, "-m", "hpcrl", "submit", str(sft(tmp_path, task)), "--run-dir", str(tmp_path / "run")]
    words += ["--set", *BARE, "trainer.partition=cpu"]
    outer = f"#!/bin/bash\ncd {REPO}\nexport PMIX_RANK=0 PMI_RANK=0\n{' '.join(words)} > {tmp_path}/said 2>&1\n"
    number = bare.sbatch("--partition=cpu", "--nodes=1", "--mem-per-cpu=100", "--exclusive", script=outer)
    bare.wait_state(number, "COMPLETED", 120)
    inner = int(re.match(r"job (\d+)", (tmp_path / "said").read_text())[1])
    trains(Job(bare, tmp_path / "run", inner))


def test_the_mount_remembers_absence_for_a_minute_and_lists_what_is_there(bare: Cluster, cached: Path) -> None:
    file = cached / "later"
    assert bare.run(["test", "-e", file], "node2", check=False).returncode == 1
    bare.run(["touch", file], "node1")
    assert bare.run(["test", "-e", file], "node2", check=False).returncode == 1, "or else the test below shows nothing"
    assert bare.run(["ls", cached], "node2").stdout == "later\n"


def test_grpo_over_three_hosts_with_a_cache_of_a_minute_in_between(
    bare: Cluster, cached: Path, tmp_path: Path, task: Path
) -> None:
    job = submit(bare, policy(tmp_path, task), cached / "run", "trainer.partition=cpu", "engine.partition=cpu")
    job.root = tmp_path / "real" / "run"  # looked at without the cache
    trains(job, 5)
    spent = [row["perf/step_time"] for row in rows(job.root) if "perf/step_time" in row]
    assert max(spent) < 50, f"no step waits for a cache to forget: {spent}"
