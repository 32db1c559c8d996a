"""A test cluster that is as unkind as real sites are (`bare` of tools/cluster), and runs on it.

Its nodes have no GPUs and no generic resources, cores of two hardware threads, a TMPDIR that only they know; there is
no default partition, and partitions of one node.  What a site's environment and its lines of set-up add is
`careless_site`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.able import require
from tests.support.cluster import Cluster
from tests.support.runs import metrics
from tests.support.slurm import ENV, Job
from tests.support.torn_srun import install

#: what docs/slurm.md sets on nodes without GPUs
BARE = (
    "trainer.gpus_per_node=0",
    "trainer.mem=4G",
    "trainer.cpus_per_node=2",
    "engine.gpus_per_node=0",
    "engine.mem=4G",
)
#: of a user whose Slurm hands no variable on, and whose home directory nobody can write to
HOSTILE = {"SBATCH_EXPORT": "NONE", "SLURM_EXPORT_ENV": "NONE", "HOME": "/tmp/home"}


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster of this session; every tmp_path is on its shared file system."""
    require("cluster")
    running = Cluster(tmp_path_factory.mktemp("bare"), visible=[tmp_path_factory.getbasetemp()], bare=True, nodes=3)
    for node in running.nodes:
        running.run("mkdir -p /tmp/home && mount -t tmpfs -o ro tmpfs /tmp/home", node)
    yield running
    running.stop()


def careless_site(folder: Path) -> Path:
    """A profile whose lines of set-up fail under `set -eu`, of a cluster whose srun gives out torn lines; variables
    that the processes need, and no shell hands on."""
    lines = ["echo $CONDA_BACKUP_NOT_SET", "false", f"export PATH={install(folder / 'bin')}:{os.environ['PATH']}"]
    values = "".join(f"{name} = {json.dumps(value)}\n" for name, value in ENV.items())
    site = folder / "careless.toml"
    parts = "".join(
        f'[{part}]\npartition = "cpu"\nextra = {{ hint = "nomultithread" }}\n' for part in ("trainer", "engine")
    )
    site.write_text(f"setup = {json.dumps(lines)}\n[env]\n{values}{parts}")
    return site


def command(file: Path, root: Path, *settings: str) -> list[str]:
    """`hpcrl submit` with what nodes without GPUs want."""
    return [sys.executable, "-m", "hpcrl", "submit", str(file), "--run-dir", str(root), "--set", *BARE, *settings]


def submit(cluster: Cluster, file: Path, root: Path, *settings: str, **more: str) -> Job:
    done = cluster.run(command(file, root, *settings), env=ENV | more, timeout=240)
    return Job(cluster, root, int(re.match(r"job (\d+)", done.stdout)[1]))


def trains(job: Job, steps: int = 6) -> None:
    job.ends()
    assert list(metrics(job.root)) == list(range(steps)), job.logs()
