"""The allocation is kept: whatever ends inside it, the run continues there, with the numbers of one that nothing has
disturbed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.run.attempt_log import faults_of, read_attempts
from tests.support.cluster import Cluster
from tests.support.runs import KEPT, SubmittedRun, metrics, policy, samples, sft
from tests.support.slurm import hpcrl, submit
from tests.whole_runs.test_under_mpirun import MPIRUN, environment

pytestmark = pytest.mark.cluster


def find(cluster: Cluster, module: str, node: str | None = None) -> list[int]:
    """The processes with this module in their command line, on a node or on all."""
    found = {node: cluster.processes(node)} if node else cluster.all_processes()
    return [pid for processes in found.values() for pid, argv in processes if module in argv]


def begins(root: Path, attempt: int) -> Callable[[], bool]:
    """Whether the ranks of an attempt are about to train."""
    return (root / f"attempts/{attempt}/peers/trainer-0.json").exists


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, task: Path) -> Path:
    job = submit(cluster, policy(path := tmp_path_factory.mktemp("undisturbed"), task), path / "run")
    job.ends()
    return job.root


def test_slurm_job_is_kept(cluster: Cluster, tmp_path: Path, task: Path, undisturbed: Path) -> None:
    """A rank, the rollout process and the process of a trainer host are killed in a heterogeneous job: it was never
    queued again, the engine lives through the first two, and no number differs."""
    job = submit(cluster, policy(tmp_path, task, **KEPT), tmp_path / "run")
    engines = []
    for attempt, module in enumerate(("hpcrl.trainer.main", "hpcrl.rollout.main", "hpcrl.launch.host")):
        job.until(lambda least=attempt: job.steps() > least)
        engines.append(find(cluster, "hpcrl.engine.server"))
        node = json.loads((job.root / f"attempts/{attempt}/plan.json").read_text())["trainers"][0]["host"]
        os.kill(find(cluster, module, None if "rollout" in module else node)[-1], signal.SIGKILL)
        job.until(begins(job.root, attempt + 1))
    job.ends()
    assert metrics(job.root) == metrics(undisturbed) and samples(job.root) == samples(undisturbed)
    assert cluster.job(job.number)["Restarts"] == "0"
    assert engines[0] == engines[1] == engines[2] != []
    told = faults_of(read_attempts(job.root))
    assert [fault.who.partition("-")[0] for fault in told][:2] == ["trainer", "rollout"] and len(told) == 3
    assert all(fault.repeated is not None and fault.repeated <= 4 and fault.seconds > 0 for fault in told), told
    said = hpcrl(cluster, "status", job.root).stdout
    assert "faults" in said and "until it trained again" in said, said


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_mpirun_is_kept(cluster: Cluster, tmp_path: Path, task: Path, kind: str) -> None:
    """A rank is killed, then the process of a host: both times the same mpirun continues, bit for bit."""
    hosts = cluster.hostfile(kind, ["node1", "node2"], path=tmp_path / "hosts")
    found = {}
    for name, faults in (("whole", ()), ("cut", ("hpcrl.trainer.main", "hpcrl.launch.host"))):
        run = SubmittedRun(tmp_path / name / "run")
        command = [sys.executable, "-m", "hpcrl", "launch", sft(tmp_path / name, task, **KEPT), "--hostfile", hosts]
        launched = cluster.popen(
            [*command, "--mpirun", MPIRUN[kind], "--run-dir", run.root], env=environment(cluster, kind)
        )
        try:
            for attempt, module in enumerate(faults):
                run.until(lambda least=attempt, run=run: run.steps() > least, 120)
                os.kill(find(cluster, module, "node2")[-1], signal.SIGKILL)
                run.until(begins(run.root, attempt + 1), 120)
            said, _ = launched.communicate(timeout=120)
        finally:
            launched.kill()
        assert launched.returncode == 0, said
        found[name] = metrics(run.root)
    assert found["cut"] == found["whole"] and len(found["cut"]) == 6
