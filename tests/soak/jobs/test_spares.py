"""Hosts lost one after another in a job that has others to spare: it trains on in the same job, with the same numbers.

SEED and N as in test_faults.py: N jobs a seed, each of which loses two of its four hosts, at moments and in ways that
the seed draws, but never the launcher's own.

    make soak SOAK=spares N=10 SEED=1
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from hpcrl.run.attempt_log import LeftOutRecord, read_attempts
from tests.soak.test_faults import SEEDS
from tests.support.cluster import Cluster
from tests.support.runs import KEPT, metrics, sft
from tests.support.slurm import Job, submit

pytestmark = [pytest.mark.soak, pytest.mark.cluster]
STEPS = {"num_rollout": 60, "hang_timeout": 15}
WAYS = ("power", "power", "told", "link")


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, task: Path) -> Path:
    job = submit(cluster, sft(path := tmp_path_factory.mktemp("undisturbed"), task, **STEPS), path / "run")
    job.ends()
    return job.root


@pytest.mark.parametrize("number", range(max(1, int(os.environ.get("N") or 2))))
@pytest.mark.parametrize("seed", SEEDS)
def test_two_hosts_are_lost(
    cluster: Cluster, tmp_path: Path, task: Path, undisturbed: Path, seed: int, number: int
) -> None:
    chance = random.Random(f"{seed} {number}")
    job = submit(cluster, sft(tmp_path, task, **STEPS, **KEPT, spares=2), tmp_path / "run")
    told, cut = [], []
    try:
        for attempt in range(2):
            job.until(lambda attempt=attempt: training(job, attempt), 300)
            time.sleep(chance.uniform(0, 0.5))
            way, host = chance.choice(WAYS), chance.choice(others(job, attempt))
            cut.append((way, host))
            began = time.monotonic()
            cluster.link(host, "down") if way == "link" else cluster.kill_node(host, told=way == "told")
            job.until(lambda attempt=attempt: training(job, attempt + 1), 300)
            told.append(f"{way} of {host}: {time.monotonic() - began:.1f} s")
        job.ends()
    finally:
        for way, host in cut:
            restore(cluster, way, host)
    print(f"seed {seed}, job {number}: {'; '.join(told)}")
    assert metrics(job.root) == metrics(undisturbed)
    assert cluster.job(job.number)["Restarts"] == "0"
    left = [record.host for record in read_attempts(job.root) if isinstance(record, LeftOutRecord)]
    assert left == [host for _, host in cut]


def training(job: Job, attempt: int) -> bool:
    """Whether the ranks of an attempt are about to train."""
    return (job.root / f"attempts/{attempt}/peers/trainer-0.json").exists()


def others(job: Job, attempt: int) -> list[str]:
    """The hosts of an attempt but for the launcher's."""
    plan = json.loads((job.root / f"attempts/{attempt}/plan.json").read_text())
    launcher = json.loads((job.root / "state.json").read_text())["host"]
    return sorted({place["host"] for place in plan["trainers"]} - {launcher})


def restore(cluster: Cluster, way: str, host: str) -> None:
    if way == "link":
        cluster.link(host, "up")
        cluster.restart_slurmd(host)
    else:
        cluster.boot_node(host)
        cluster.run(["scontrol", "update", f"nodename={host}", "state=resume"], check=False)
