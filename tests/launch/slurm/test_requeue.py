"""Queueing a job again, with the words of a real Slurm: done, refused, under way, and a controller that does not
answer."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcrl.launch.slurm.submit import NOT_INHERITED
from tests.support.cluster import Cluster
from tests.support.runs import sft
from tests.support.slurm import ENV, submit

pytestmark = pytest.mark.cluster
#: the end of a batch process whose time is up: RUN, the job's number and its time limit
PROGRAM = """
import sys, time
from pathlib import Path
from hpcrl.launch import batch_run
from hpcrl.launch.job import RunJob
from hpcrl.launch.slurm.batch_process import SlurmAllocation
batch_run.PARTING, batch_run.AGAIN = 0.0, 1.0
allocation = SlurmAllocation.__new__(SlurmAllocation)  # its steps are of no matter here
allocation.job_id, allocation.restarts = sys.argv[2], 0
batch_run._requeue(RunJob(None, {}, Path(sys.argv[1]), "id"), allocation, "no time", time.time() + float(sys.argv[3]))
"""


def requeue(root: Path, number: int, left: float = 300.0) -> list[str | Path]:
    root.mkdir(exist_ok=True)
    (root / "job.json").write_text(
        json.dumps({"identity": "id", "scheduler": "slurm", "job_id": str(number), "submitted": 0})
    )
    return ["env", "HPCRL_MAX_REQUEUES=2", sys.executable, "-c", PROGRAM, root, str(number), str(left)]


def state(root: Path) -> dict[str, str]:
    return json.loads((root / "state.json").read_text())


@pytest.fixture
def running(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Starts a job that sleeps, with an option of sbatch; its number."""
    started: list[int] = []

    def start(option: str) -> int:
        started.append(cluster.sbatch("-p", "main", "-o", tmp_path / "out", option, "--wrap", "sleep 600"))
        cluster.wait_state(started[-1], "RUNNING", 60)
        return started[-1]

    yield start
    for number in started:
        cluster.run(["scancel", str(number)])


def test_refusal_and_requeue_by_slurm(cluster: Cluster, tmp_path: Path, running: Callable[[str], int]) -> None:
    """A refusal is reported, and a Slurm that requeued first is not asked again."""
    refused = running("--no-requeue")
    done = cluster.run(requeue(tmp_path / "refused", refused), env=ENV)
    words = f"Slurm does not requeue it: scontrol requeue {refused}: Requested operation is presently disabled"
    assert words in done.stderr, done.stderr
    assert state(tmp_path / "refused")["phase"] == "stopped" and words in state(tmp_path / "refused")["message"]
    words = ["salloc", "-p", "main", "--no-shell", "-N1"]
    interactive = int(re.search(r"allocation (\d+)", cluster.run(words).stderr)[1])
    done = cluster.run(requeue(tmp_path / "interactive", interactive), env=ENV)
    cluster.run(["scancel", str(interactive)])
    assert state(tmp_path / "interactive")["phase"] == "stopped" and "batch jobs" in done.stderr.lower(), done.stderr
    taken = running("--requeue")
    cluster.run(["scontrol", "requeue", str(taken)])
    done = cluster.run(requeue(tmp_path / "taken", taken), env=ENV)
    assert "again by itself" in done.stderr, done.stderr
    assert state(tmp_path / "taken")["phase"] == "requeued"
    done = cluster.run(requeue(tmp_path / "gone", 999999), env=ENV)
    assert "Invalid job id specified" in done.stderr and state(tmp_path / "gone")["phase"] == "stopped"


@pytest.mark.soak
def test_a_lost_node_costs_no_queue(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """From Slurm 25.11 on: the run begins again before a job that waited before it; when it fails, it is not held."""
    version = re.search(r"(\d+)\.(\d+)", cluster.run(["sbatch", "--version"]).stdout)
    if (int(version[1]), int(version[2])) < (25, 11):
        pytest.skip("this Slurm knows no expedited requeue")
    path = sft(tmp_path, task, num_rollout=100000, save_interval=None, attempts=1)
    job = submit(cluster, path, tmp_path / "run")
    job.until(lambda: job.training(0))
    assert cluster.job(job.number)["ExpeditedRequeue"] == "Yes"
    before = cluster.sbatch("-p", "main", "--nodes=3", "--exclusive", "--wrap", "sleep 600")
    lost = json.loads((job.root / "state.json").read_text())["host"]
    cluster.kill_node(lost, told=True)
    try:
        job.until(lambda: job.trains_after(0))
        assert set(cluster.states(before).values()) == {"PENDING"}
        pids = [
            pid for found in cluster.all_processes().values() for pid, argv in found if "hpcrl.trainer.main" in argv
        ]
        os.kill(pids[-1], 9)
        job.ends("FAILED", 60)
        assert cluster.job(job.number)["Requeue"] == "0"
    finally:
        cluster.run(["scancel", str(before), str(job.number)], check=False)
        cluster.boot_node(lost)
        cluster.run(["scontrol", "update", f"nodename={lost}", "state=resume"], check=False)


def test_controller_down_for_a_while(cluster: Cluster, tmp_path: Path, running: Callable[[str], int]) -> None:
    """It is stopped where it stands: whoever asks it gets no answer."""
    number, root = running("--requeue"), tmp_path / "run"
    controller = cluster.run("pgrep -x slurmctld").stdout.split()
    cluster.run(["kill", "-STOP", *controller])
    try:
        waiting = cluster.popen(requeue(root, number), env=ENV)
        deadline = time.monotonic() + 120
        while not (root / "state.json").exists() or "does not answer yet" not in state(root)["message"]:
            assert time.monotonic() < deadline and waiting.poll() is None
            time.sleep(0.2)
        assert state(root)["phase"] == "requeued"
        late = cluster.run(requeue(tmp_path / "late", number, 8.0), env=ENV)
        assert "Slurm does not requeue" in late.stderr and state(tmp_path / "late")["phase"] == "stopped", late.stderr
    finally:
        cluster.run(["kill", "-CONT", *controller])
    out, _ = waiting.communicate(timeout=120)
    assert waiting.returncode == 0 and "queued again (1 of 2 requeues)" in out, out
    assert cluster.job(number)["Restarts"] == "1"


def test_what_sbatch_passes_to_the_next_component(cluster: Cluster, tmp_path: Path) -> None:
    """hpcrl refuses what would be passed on unseen; its table is the table of this release."""
    passed = {"--nice=7": "Nice=7", "--comment=mine": "Comment=mine", "--mem=1G": "MinMemoryNode=1G"}
    kept = {"--tmp=1": "MinTmpDiskNode=1M", "--contiguous": "Contiguous=1", "--exclusive": "OverSubscribe=NO"}
    assert {word.strip("-").partition("=")[0] for word in kept} <= NOT_INHERITED
    assert not {word.strip("-").partition("=")[0] for word in passed} & NOT_INHERITED
    words = ["-p", "main", "--hold", *passed, *kept, ":", "-p", "main", "--nodes=1", "--wrap", "true"]
    number = cluster.sbatch(*words)
    first, second = cluster.run(["scontrol", "show", "job", "-o", str(number)]).stdout.splitlines()
    cluster.run(["scancel", str(number)])
    assert all(shown in first for shown in (*passed.values(), *kept.values())), first
    assert all(shown in second for shown in passed.values()), second
    assert not [shown for shown in kept.values() if shown in second], second
