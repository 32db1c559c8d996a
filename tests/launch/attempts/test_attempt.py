"""What an attempt and a batch process make of being told to end."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.cli.resume import rewind_run
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, Stage
from hpcrl.errors import DeadlineError, HpcrlError, Interrupted, PeerError, Stopped, UsageError
from hpcrl.launch import batch_run
from hpcrl.launch.attempts import attempt, host_processes
from hpcrl.launch.attempts.attempt import HostsSilent
from hpcrl.launch.attempts.host_processes import HeldHosts
from hpcrl.launch.job import RunJob, hold_run
from hpcrl.launch.stop_signals import StopRequest
from hpcrl.plan import Host
from hpcrl.run.heartbeat import Silent
from hpcrl.run.peers import TrainerPeer, publish
from hpcrl.run.rundir import RunDir
from hpcrl.utils import waiting
from tests.launch.test_host import TimeLimitWatcher


def test_second_signal_interrupts(tmp_path: Path) -> None:
    """A second signal ends at once with the status of an interruption."""
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()
    publish(rundir, TrainerPeer(start=0, total=5))
    with pytest.raises(Interrupted, match="ended without saving") as caught:
        attempt._watch([], [], Options(), rundir, StopRequest(requests=2), lambda: None)
    assert caught.value.exit_code == 130


def test_stop_while_looking_for_hosts(tmp_path: Path) -> None:
    """Whatever the scheduler ended with it could not answer any more, which is no fault of the hosts."""

    class Ended:
        def hosts(self, *_: Any) -> list[Any]:
            raise HpcrlError("none of 2 nodes reported", "see the step's log")

    rundir = RunDir.create(tmp_path / "run")
    with pytest.raises(Stopped, match="stopped while starting"):
        attempt.run_attempt(Options(), Ended(), "id", rundir, StopRequest(requests=1), lambda: None, HeldHosts(), 0)  # type: ignore[arg-type]
    assert rundir.failure() is None
    rundir = RunDir(rundir.root, 1)
    with pytest.raises(HpcrlError, match="none of 2 nodes"):
        attempt.run_attempt(Options(), Ended(), "id", rundir, StopRequest(), lambda: None, HeldHosts(), 0)  # type: ignore[arg-type]
    assert "none of 2 nodes" in str(rundir.failure())


def test_file_system_that_fails_as_an_attempt_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error as others are, after which another attempt may begin."""
    rundir = RunDir.create(tmp_path / "run")

    def stale(_: RunDir) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(RunDir, "make_attempt", stale)
    with pytest.raises(HpcrlError, match="attempt 0 of.*Stale file handle"):
        attempt.run_attempt(Options(), None, "id", rundir, StopRequest(), lambda: None, HeldHosts(), 0)  # type: ignore[arg-type]
    assert not HeldHosts(members=[SimpleNamespace(status=None, expendable="")]).pause(rundir, lambda: None)  # type: ignore[list-item]


def test_error_that_a_host_could_not_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that could not record its error is reported with its own last log lines."""
    clock = TimeLimitWatcher()  # for who knows why, three seconds are left to say so
    monkeypatch.setattr(attempt, "time", clock)
    monkeypatch.setattr(waiting, "time", clock)
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()
    log = tmp_path / "host.log"
    log.write_text("10:00:00 error: on node1: rollout-0 ended with exit code 1; it says: the file system is full\n")
    ended = SimpleNamespace(
        name="the process of this host", status=1, log=log, memory=None, expendable="", lost=lambda: ""
    )
    with pytest.raises(
        PeerError,
        match="exit code 1.*run was over;.*node1:.*the file system is full;",
    ):
        attempt._check([ended], rundir)  # type: ignore[list-item]
    assert clock.now >= 1003


class Allocation:
    """A job that says whether Slurm preempts it, and notes whether it was asked to queue it again."""

    restarts = 0
    job_id = "7"

    class backend:
        count = 2
        silent = staticmethod(lambda seconds: [])

    def __init__(self, preempts: bool) -> None:
        self.preempts = preempts
        self.requeued = 0

    def ends(self) -> float | None:
        return None

    def failed(self, hosts: Sequence[str], since: float, until: float) -> dict[str, str]:
        return {}

    def preempted(self) -> bool:
        return self.preempts

    def requeue(self) -> None:
        self.requeued += 1


@pytest.mark.parametrize(
    ("preempts", "user", "requeued"), [(True, None, 1), (False, None, 0), (True, "stop", 0), (True, "cancel", 0)]
)
@pytest.mark.parametrize(
    "error", [Stopped("saved and stopped after 3 of 5 rollouts"), PeerError("trainer-1 was told to end")]
)
def test_a_run_that_a_preemption_ended_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: HpcrlError, preempts: bool, user: str | None, requeued: int
) -> None:
    """Whoever was told to end within a grace time has saved and left before the scheduler's own end, which would
    requeue."""
    job = RunJob(Recipe("r", tmp_path / "r.toml", {}, (), ()), {}, tmp_path, "identity")

    def ended(*_: Any, **__: Any) -> int:
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


@pytest.mark.parametrize(("due", "requeued"), [(True, 1), (False, 0)])
def test_slow_save_at_time_limit_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, due: bool, requeued: int
) -> None:
    """From its last checkpoint, as a step longer than the time that is left needs; an error before is the run's end."""
    job = RunJob(Recipe("r", tmp_path / "r.toml", {}, (), ()), {}, tmp_path, "identity")

    def late(job: RunJob, backend: Any, restarts: int, watch: Any, ends: Any, **_: Any) -> int:
        watch.__self__.due = due
        raise DeadlineError("the run did not save and end within 20 s")

    monkeypatch.setattr(batch_run, "run_job", late)
    monkeypatch.setattr(batch_run, "PARTING", 0.0)
    monkeypatch.setenv("HPCRL_MAX_REQUEUES", "3")
    allocation = Allocation(False)
    with pytest.raises(DeadlineError, match="did not save"):
        batch_run.run_in_job(job, allocation)  # type: ignore[arg-type]
    assert allocation.requeued == requeued


def test_slurm_says_that_it_preempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcrl.launch.slurm.batch_process import SlurmAllocation
    from tests.support.rundirs import FakeSlurm

    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.bin}:/bin:/usr/bin")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "HPCRL_STEP_0": "srun", "HPCRL_SLOTS_0": "8"}
    allocation = SlurmAllocation(job)
    for value, preempted in (("2026-11-22T02:00:00", True), ("None", False), ("1795256920", True)):
        fake.command(
            "scontrol", f"JobId=7 JobState=RUNNING PreemptEligibleTime=2026-11-22T01:00:00 PreemptTime={value} X=1\n"
        )
        assert allocation.preempted() is preempted
    fake.command("scontrol", "", 1, "slurm_load_jobs error")
    assert not allocation.preempted()
    with pytest.raises(HpcrlError, match="no valid"):
        SlurmAllocation({"SLURM_JOB_ID": "7"})


def test_lost_host_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to be seen is a peer's broken connection; the host that cannot start a task any more is the cause."""
    rundir = RunDir.create(tmp_path / "run")
    job = RunJob(Recipe("r", tmp_path / "r.toml", {}, (), (Stage("", {}),)), {}, rundir.root, "identity")
    (rundir.root / "options.json").write_text("{}")
    rundir.make_attempt()

    def ended(*_: Any, **__: Any) -> int:
        rundir.fail("trainer", 0, "RuntimeError: Connection closed by peer [10.0.0.2]:1234")
        rundir.check()
        raise AssertionError

    monkeypatch.setattr(batch_run, "run_job", ended)
    monkeypatch.setattr(batch_run, "PARTING", 0.0)
    monkeypatch.setenv("HPCRL_MAX_REQUEUES", "3")
    allocation = Allocation(preempts=False)
    monkeypatch.setattr(allocation.backend, "silent", staticmethod(lambda seconds: ["node2"]))
    with pytest.raises(
        PeerError, match=r"^no answer from node2: .*first seen as: trainer-0: RuntimeError: Connection closed"
    ):
        batch_run.run_in_job(job, allocation)  # type: ignore[arg-type]
    assert allocation.requeued == 1
    failure = rundir.failure()
    assert failure is not None and str(failure).startswith("no answer from node2")


@pytest.mark.parametrize(
    ("disk", "said"),
    [("", "the process of host node1.*sign of life for 30 s"), ("RUN is full", "^RUN is full; no host")],
)
def test_failed_heartbeat_write_is_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str, said: str
) -> None:
    """A disk that refuses heartbeats does not make a host count as hung."""

    class Heard:
        def silent(self, seconds: float) -> list[Silent]:
            return [Silent("node1", 7, 30.0)]

    monkeypatch.setattr(attempt, "write_obstacle", lambda directory: disk)
    rundir = RunDir.create(tmp_path / "run")
    rundir.make_attempt()
    with pytest.raises(PeerError, match=said):
        attempt._check_hosts(Heard(), ["node1"], 20.0, rundir)  # type: ignore[arg-type]


def test_unwritable_error_is_left_with_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that no file takes is left with the scheduler."""
    job = RunJob(Recipe("r", tmp_path / "r.toml", {}, (), ()), {}, tmp_path, "identity")
    marked: list[tuple[str, str]] = []
    allocation = Allocation(preempts=False)
    monkeypatch.setattr(allocation, "mark", lambda identity, said="": marked.append((identity, said)), raising=False)

    def ended(*_: Any, **__: Any) -> int:
        raise PeerError("cannot write metrics.jsonl: the file system is full")

    monkeypatch.setattr(batch_run, "run_job", ended)
    for disk in ("", "RUN cannot be written to: the file system is full"):
        monkeypatch.setattr(batch_run, "write_obstacle", lambda directory, disk=disk: disk)
        with pytest.raises(PeerError):
            batch_run.run_in_job(job, allocation)  # type: ignore[arg-type]
    assert marked == [("identity", "cannot write metrics.jsonl: the file system is full")], (
        "once: where a file takes it, that has it"
    )


def test_a_run_goes_back_to_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path / "run")
    job = RunJob(Recipe("r", tmp_path / "r.toml", {}, (), (Stage("", {}),)), {}, rundir.root, "identity")
    with pytest.raises(UsageError, match="has saved nothing yet"):
        rewind_run(job, 2)
    rundir.options_file.write_text(Options().model_dump_json())
    for number in (2, 4):
        (rundir.checkpoints / f"iter_{number:07d}").mkdir()
    tracker = rundir.checkpoints / "latest_checkpointed_iteration.txt"
    tracker.write_text("4")
    with pytest.raises(UsageError, match="--ckpt-step 3:.*/checkpoints has no such checkpoint;.*2, 4"):
        rewind_run(job, 3)
    rewind_run(job, 2)
    assert tracker.read_text() == "2" and (rundir.checkpoints / "iter_0000004").is_dir(), "nothing is removed"
    assert (rundir.checkpoints / "ckpt_step.txt").read_text() == "2", "no other is taken for it"
    with hold_run(rundir.root), pytest.raises(UsageError, match="in use by process"):
        rewind_run(job, 4)


@pytest.mark.parametrize(("status", "code"), [("stopped", 143), ("finished", 0)])
def test_stopped_run_ends_its_job_as_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    """Or else accounting calls it complete, and the export that waits for its success begins."""
    import atexit
    import os

    from hpcrl.launch.slurm import batch_process

    found = {"status": status, "message": "saved and stopped after 3 of 5 rollouts"}
    monkeypatch.setattr(batch_process, "run_in_job", lambda *_: found)
    monkeypatch.setattr(batch_process, "reopen_job", lambda _: None)
    monkeypatch.setattr(batch_process, "SlurmAllocation", lambda: SimpleNamespace(end_for_good=lambda: None))
    left: list[tuple[Any, ...]] = []
    monkeypatch.setattr(atexit, "register", lambda *words: left.append(words))
    assert batch_process.run_directory("/run") == found, "submitit keeps it as the job's result"
    assert left == ([(os._exit, code)] if code else [])
    monkeypatch.setattr(batch_run, "run_in_job", lambda *_: found)
    monkeypatch.setattr(
        batch_run, "begin_job", lambda *_, **__: RunJob(Recipe("r", tmp_path / "r.toml", {}, (), ()), {}, tmp_path, "i")
    )
    monkeypatch.setattr(batch_run, "load_recipe", lambda _: None)

    class Here(Allocation):
        cluster = None
        mark = nodes = lambda *_: None

    assert batch_run.batch_main(["r.toml", "--run-dir", str(tmp_path)], lambda: Here(False)) == code  # type: ignore[arg-type]


@pytest.mark.parametrize("here", [True, False])
def test_a_second_signal_ends_hosts_at_once(here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all of the run is below the launcher, the host's own end is not waited for; a scheduler's step has its time."""
    rundir, polls, killed = RunDir.create(tmp_path / "run"), list[int](), list[float]()
    member = SimpleNamespace(status=None, memory=object() if here else None, end=lambda: None)
    monkeypatch.setattr(host_processes, "PARTING", 0.5)

    def end_descendants(grace: float) -> None:
        killed.append(grace)
        member.status = -9

    monkeypatch.setattr(host_processes, "end_descendants", end_descendants)
    HeldHosts(members=[member]).end(rundir, lambda: polls.append(1), lambda: len(polls) > 1)  # type: ignore[list-item]
    assert (len(polls) == 2) == here and killed[0] == host_processes.AT_ONCE


def test_a_later_stage_without_a_lost_host(tmp_path: Path) -> None:
    """Another allocation may hold it: the loss of an earlier stage is no error of its settings."""
    held, rundir = HeldHosts(hosts=[Host("node0", 2)]), RunDir.create(tmp_path / "run")
    given = Options(actor_num_nodes=2, actor_num_gpus_per_node=2, loss_type="sft_loss", label_key="l")
    backend: Any = SimpleNamespace(left_out=[])
    with pytest.raises(UsageError):
        attempt._planned(given, backend, held, "run", rundir)
    backend.left_out = ["node1"]
    with pytest.raises(HostsSilent, match="without node1"):
        attempt._planned(given, backend, held, "run", rundir)
