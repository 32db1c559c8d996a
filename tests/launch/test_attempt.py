"""What an attempt and a batch process make of being told to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe
from hpcrl.errors import HpcrlError, Interrupted, PeerError, Stopped
from hpcrl.launch import attempt, batch_run
from hpcrl.launch.attempt import Stop
from hpcrl.launch.job import Job
from hpcrl.run.peers import TrainerPeer, publish
from hpcrl.run.rundir import RunDir


def test_a_second_signal_ends_at_once_with_the_status_of_an_interruption(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path / "run")
    rundir.begin()
    publish(rundir, TrainerPeer(start=0, total=5))
    with pytest.raises(Interrupted, match="ended at once") as caught:
        attempt._watch([], Options(), rundir, Stop(requests=2), lambda: None)
    assert caught.value.exit_code == 130


class Allocation:
    """A scheduler that says whether it preempts the job, and notes whether it was asked to queue it again."""

    title, restarts, job_id = "Slurm", 0, "7"

    class backend:
        count = 2
        silent = staticmethod(lambda seconds: [])

    def __init__(self, preempts: bool) -> None:
        self.preempts, self.requeued = preempts, 0

    def ends(self) -> float | None:
        return None

    def preempted(self) -> bool:
        return self.preempts

    def requeue(self) -> None:
        self.requeued += 1


@pytest.mark.parametrize(
    ("preempts", "user", "requeued"), [(True, None, 1), (False, None, 0), (True, "stop", 0), (True, "cancel", 0)]
)
@pytest.mark.parametrize("error", [Stopped("saved and stopped after 3 of 5 rollouts"), PeerError("trainer-1 was told to end")])
def test_a_run_that_a_preemption_ended_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: HpcrlError, preempts: bool, user: str | None, requeued: int
) -> None:
    """Whoever was told to end within a grace time has saved and left before the scheduler's own end, which would requeue."""
    job = Job(Recipe("r", tmp_path / "r.toml", {}, (), ()), {}, tmp_path, "identity")

    def ended(*_: Any) -> int:
        if user:
            (job.root / user).touch()
        raise error

    monkeypatch.setattr(batch_run, "run_job", ended)
    monkeypatch.setattr(batch_run, "PARTING", 0.0)
    monkeypatch.setenv("HPCRL_MAX_REQUEUES", "3")
    allocation = Allocation(preempts)
    if isinstance(error, Stopped):
        assert batch_run.run_in_job(job, allocation)["status"] == "stopped"  # type: ignore[arg-type]
    else:
        with pytest.raises(PeerError, match="told to end"):
            batch_run.run_in_job(job, allocation)  # type: ignore[arg-type]
    assert allocation.requeued == requeued


def test_slurm_says_that_it_preempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcrl.slurm.batch_process import SlurmAllocation
    from tests.support.rundirs import FakeSlurm

    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.bin}:/bin:/usr/bin")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "HPCRL_STEP_0": "srun", "HPCRL_SLOTS_0": "8"}
    allocation = SlurmAllocation(job)
    for value, preempted in (("2026-11-22T02:00:00", True), ("None", False), ("1795256920", True)):
        fake.command("scontrol", f"JobId=7 JobState=RUNNING PreemptEligibleTime=2026-11-22T01:00:00 PreemptTime={value} X=1\n")
        assert allocation.preempted() is preempted
    fake.command("scontrol", "", 1, "slurm_load_jobs error")
    assert not allocation.preempted()
    with pytest.raises(HpcrlError, match="no good"):
        SlurmAllocation({"SLURM_JOB_ID": "7"})


@pytest.mark.parametrize(("status", "code"), [("stopped", 143), ("finished", 0)])
def test_a_job_whose_run_was_stopped_ends_with_the_status_of_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    """Or else accounting calls it complete, and the export that waits for its success begins."""
    import atexit
    import os

    from hpcrl.slurm import batch_process

    found = {"status": status, "message": "saved and stopped after 3 of 5 rollouts"}
    monkeypatch.setattr(batch_process, "run_in_job", lambda *_: found)
    monkeypatch.setattr(batch_process, "reopen_job", lambda _: None)
    monkeypatch.setattr(batch_process, "SlurmAllocation", lambda: None)
    left: list[tuple[Any, ...]] = []
    monkeypatch.setattr(atexit, "register", lambda *words: left.append(words))
    assert batch_process.run_directory("/run") == found, "submitit keeps it as the job's result"
    assert left == ([(os._exit, code)] if code else [])
    monkeypatch.setattr(batch_run, "run_in_job", lambda *_: found)
    monkeypatch.setattr(batch_run, "begin_job", lambda *_: Job(Recipe("r", tmp_path / "r.toml", {}, (), ()), {}, tmp_path, "i"))
    monkeypatch.setattr(batch_run, "load_recipe", lambda _: None)

    class Here(Allocation):
        scheduler, cluster = "slurm", None
        mark = nodes = lambda *_: None

    assert batch_run.batch_main(["r.toml", "--run-dir", str(tmp_path)], lambda: Here(False)) == code  # type: ignore[arg-type]
