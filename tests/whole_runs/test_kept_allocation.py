"""The allocation is kept: whatever ends inside it, the run continues there, with the numbers of one that nothing has
disturbed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from hpcrl.run.attempt_log import faults_of, lowered_settings, read_attempts
from tests.documents.texts import printed
from tests.support.cluster import Cluster
from tests.support.out_of_memory import PLACES, engine_flags
from tests.support.runs import KEPT, SubmittedRun, hold, metrics, policy, samples, sft
from tests.support.slurm import HURRY, hpcrl, submit
from tests.whole_runs.test_under_mpirun import MPIRUN, environment
from tools.cluster import control

pytestmark = pytest.mark.cluster
LONGER = {"num_rollout": 10}  #: steps enough for three faults, each after one of its own
SLOW = "tests.support.slurm.slow"  #: the reward of `policy`, after a second


def find(cluster: Cluster, module: str, node: str | None = None) -> list[int]:
    """The processes with this module in their command line, on a node or on all; what one has forked has a greater
    number."""
    found = {node: cluster.processes(node)} if node else cluster.all_processes()
    return [pid for processes in found.values() for pid, argv in processes if module in argv]


def copies(cluster: Cluster, node: str) -> list[Path]:
    """The parts of the newest step that a node has in its memory."""
    memory = Path(f"/proc/{control.leader(cluster.layout, node)}/root/dev/shm")
    return [path.parent for path in memory.glob("hpcrl-copies-*/[0-9]*/rank-*/index.json")]


def resumes_in(run: SubmittedRun, attempt: int, steps: int) -> None:
    """Wait for an attempt; it must begin at most one step before so many, which memory alone has: nothing was saved."""
    peer = run.root / f"attempts/{attempt}/peers/trainer-0.json"
    run.until(peer.exists, 120)
    assert json.loads(peer.read_text())["start"] >= steps - 1


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, task: Path) -> Path:
    job = submit(cluster, policy(path := tmp_path_factory.mktemp("undisturbed"), task, **LONGER), path / "run")
    job.ends()
    return job.root


def test_slurm_job_is_kept(cluster: Cluster, tmp_path: Path, task: Path, undisturbed: Path) -> None:
    """A rank, the rollout process and the process of a trainer host are killed in a heterogeneous job: it was never
    queued again, the engine lives through the first two, and no number differs.  With a copy of every step in the memory
    of two hosts, and none on disk, one step at most is made again, also where one host's memory is lost."""
    memory = {"save_interval": None, "non_persistent_save_interval": 1}
    job = submit(cluster, policy(tmp_path, task, **memory, **KEPT, **LONGER, custom_rm_path=SLOW), tmp_path / "run")
    engines = []
    for attempt, module in enumerate(("hpcrl.trainer.main", "hpcrl.rollout.main", "hpcrl.launch.host")):
        # before its second step an attempt may have no copy: the disk has what it began with
        own = 2 if "rollout" in module else 1
        job.until(lambda attempt=attempt, own=own: job.training(attempt, own))
        engines.append(find(cluster, "hpcrl.engine.server"))
        node, other = (
            p["host"] for p in json.loads((job.root / f"attempts/{attempt}/plan.json").read_text())["trainers"]
        )
        steps = job.steps()
        os.kill(min(find(cluster, module, None if "rollout" in module else node)), signal.SIGKILL)
        if "rollout" in module:
            assert {path.name for path in copies(cluster, other)} == {"rank-00000", "rank-00001"}
            for part in copies(cluster, node):
                shutil.rmtree(part)
        resumes_in(job, attempt + 1, steps)
    (job.root / HURRY).touch()
    job.ends()
    assert metrics(job.root) == metrics(undisturbed) and samples(job.root) == samples(undisturbed)
    assert cluster.job(job.number)["Restarts"] == "0"
    assert engines[0] == engines[1] == engines[2] != []
    told = faults_of(read_attempts(job.root))
    assert [fault.who.partition("-")[0] for fault in told][:2] == ["trainer", "rollout"] and len(told) == 3
    assert all(fault.repeated is not None and fault.repeated <= 1 and fault.seconds > 0 for fault in told), told
    said = hpcrl(cluster, "status", job.root).stdout
    assert "faults" in said and "until it trained again" in said, said


def test_spare_host_takes_a_place(cluster: Cluster, tmp_path: Path, task: Path, undisturbed: Path) -> None:
    """Submitted with the flags that the page prints.  The power of a trainer's host is cut: a spare host of the same job
    trains on, with the engine that lives, and no number differs.  Then that of the launcher's: the job is queued again, and holds no node until its limit."""
    (flags,) = {tuple(line.words[3:]) for line in printed() if line.verb == "submit" and "--spares" in line.words}
    assert flags[-2:] == ("--spares", "1")
    recipe = policy(tmp_path, task, **KEPT, **LONGER, hang_timeout=15, custom_rm_path=SLOW)
    job = submit(cluster, recipe, tmp_path / "run", *flags)
    job.until(lambda: job.steps() > 0)
    first, last = (trainers := json.loads((job.root / "attempts/0/plan.json").read_text())["trainers"])[0], trainers[-1]
    engines = find(cluster, "hpcrl.engine.server")
    cluster.kill_node(last["host"])
    job.until((job.root / "attempts/1/peers/trainer-0.json").exists, 120)
    assert find(cluster, "hpcrl.engine.server") == engines != []
    cluster.boot_node(last["host"])
    job.until(lambda: job.steps() > 2)
    assert (
        cluster.job(job.number)["Restarts"] == "0"
        and last["host"] not in (job.root / "attempts/1/plan.json").read_text()
    )
    cluster.kill_node(first["host"])
    job.until(lambda: cluster.job(job.number)["Restarts"] == "1", 200)
    cluster.boot_node(first["host"])
    (job.root / HURRY).touch()
    job.ends()
    assert metrics(job.root) == metrics(undisturbed) and samples(job.root) == samples(undisturbed)


def test_out_of_memory_in_a_job(cluster: Cluster, tmp_path: Path, task: Path, undisturbed: Path) -> None:
    """A rank has no memory in forward, backward and the optimizer, then the engine: the job is kept, uses less each time,
    and has the same losses."""
    order = tmp_path / "no-memory"
    hook = {"custom_megatron_before_train_step_hook_path": "tests.support.out_of_memory.in_a_rank", "oom_retries": 4}
    job = submit(cluster, policy(tmp_path, task, **KEPT | LONGER | hook), tmp_path / "run", *engine_flags(order))
    engines = []
    for place in PLACES:
        job.until((job.root / place).exists)
        engines.append(find(cluster, "hpcrl.engine.server"))
    order.touch()
    job.until((job.root / "attempts/4/peers/engine-0.json").exists)
    engines.append(find(cluster, "hpcrl.engine.server"))
    job.ends()
    assert cluster.job(job.number)["Restarts"] == "0"
    assert engines[0] == engines[1] == engines[2] != [] and not {*engines[2]} & {*engines[3]}
    told = lowered_settings(job.root)
    lowered = ["max_tokens_per_gpu", "recompute_granularity", "max_tokens_per_gpu", "gpu_memory_utilization"]
    assert [one.setting for one in told] == lowered, told
    assert all(one.what in hpcrl(cluster, "status", job.root).stdout for one in told)
    found = metrics(job.root)
    assert len(found) == LONGER["num_rollout"]
    for step, row in metrics(undisturbed).items():
        assert found[step]["train/loss"] == pytest.approx(row["train/loss"], rel=1e-4, abs=1e-6), step


@pytest.mark.parametrize("kind", ["openmpi", pytest.param("mpich", marks=pytest.mark.soak)])
def test_mpirun_is_kept(cluster: Cluster, tmp_path: Path, task: Path, kind: str) -> None:
    """A rank is killed, then the process of a host: both times the same mpirun continues, bit for bit, from the copies in
    the memory of its hosts, of which one was lost the first time."""
    hosts = cluster.hostfile(kind, ["node1", "node2"], path=tmp_path / "hosts")
    found = {}
    memory = {"save_interval": None, "non_persistent_save_interval": 1, "num_rollout": 8}
    memory["custom_megatron_before_train_step_hook_path"] = "tests.support.runs.held_step"
    for name, faults in (("whole", ()), ("cut", ("hpcrl.trainer.main", "hpcrl.launch.host"))):
        run = SubmittedRun(tmp_path / name / "run")
        command = [
            sys.executable,
            "-m",
            "hpcrl",
            "launch",
            sft(tmp_path / name, task, **KEPT, **memory),
            "--hostfile",
            hosts,
        ]
        launched = cluster.popen(
            [*command, "--mpirun", MPIRUN[kind], "--run-dir", run.root], env=environment(cluster, kind)
        )
        try:
            for attempt, module in enumerate(faults):
                hold(run.root, 3 + 3 * attempt)
                run.until(lambda attempt=attempt, run=run: run.training(attempt) and run.steps() > 1, 120)
                steps = run.steps()
                os.kill(min(find(cluster, module, "node2")), signal.SIGKILL)
                for part in () if attempt else copies(cluster, "node1"):
                    shutil.rmtree(part)
                resumes_in(run, attempt + 1, steps)
            hold(run.root)
            said, _ = launched.communicate(timeout=120)
        finally:
            launched.kill()
        assert launched.returncode == 0, said
        found[name] = metrics(run.root)
    assert found["cut"] == found["whole"] and len(found["cut"]) == 8
