"""Chains of jobs, and hosts that broke: who goes on, who ends at once, and what is left out at the next start."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, Stage
from hpcrl.errors import HpcrlError, PeerError, Stopped
from hpcrl.launch import batch_run
from hpcrl.launch.allocation_request import make_request
from hpcrl.launch.broken_hosts import broken_hosts, find_broken_host
from hpcrl.launch.job import RunJob
from hpcrl.launch.requeue import (
    hand_over,
    later_jobs,
    nothing_left_to_do,
    place_in_chain,
)
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.slurm.job_script import BatchScript
from hpcrl.launch.slurm.submit import render
from hpcrl.plan import Host, Location, Plan
from hpcrl.run import job_files
from hpcrl.run.exit_status import hardware_words
from hpcrl.run.job_files import (
    CANCEL,
    STOP,
    JobFile,
    JobState,
    JobStateFile,
    judging,
    read_job,
    replace_job,
    settle,
    write_state,
)
from hpcrl.run.role import read_plan
from hpcrl.run.rundir import HOSTS, RunDir
from hpcrl.run.summary import Summary, write_summary


def make(root: Path, **job: Any) -> RunJob:
    """A run directory of one stage, begun, whose job is 11 of the chain 11, 12, 13."""
    RunDir.create(root).options_file.write_text("{}")
    replace_job(root, JobFile("slurm", "11", identity="id", **{"chain": ["11", "12", "13"]} | job))
    return RunJob(Recipe("r", root / "r.toml", {}, (), (Stage("", {}),)), {}, root, "id")


class Allocation:
    """An allocation that notes what it is asked."""

    restarts = 0

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.requeued = 0
        self.left_out = []
        self.submitted: list[Path] = []
        self.backend = self
        self.count = 2

    def ends(self) -> None:
        return None

    def failed(self, hosts: Sequence[str], since: float, until: float) -> dict[str, str]:
        return {}

    def preempted(self) -> bool:
        return False

    def silent(self, _: float) -> list[str]:
        return []

    def requeue(self) -> None:
        self.requeued += 1

    def leave_out(self, job_id: str, hosts: Sequence[str]) -> None:
        self.left_out.append((job_id, list(hosts)))

    def continue_elsewhere(self, root: Path, record: JobFile) -> str:
        self.submitted.append(root)
        return "21"


def test_the_next_job_of_a_chain_is_the_runs_job(tmp_path: Path) -> None:
    job = make(tmp_path / "run")
    assert nothing_left_to_do(job, "11") == "" and read_job(job.root).job_id == "11"
    assert nothing_left_to_do(job, "12") == "" and read_job(job.root).job_id == "12"
    assert later_jobs(read_job(job.root)) == ("13",) and place_in_chain(read_job(job.root), "13") == 2
    assert hand_over(job.root, "12") == "13" and read_job(job.root).job_id == "13"
    assert hand_over(job.root, "13") is None
    assert nothing_left_to_do(job, "99") == "", "a job of no chain, such as a script by hand"


@pytest.mark.parametrize(
    ("what", "said"), [("finished", "the run is finished"), ("stop", "hpcrl stop"), (CANCEL, "cancelled")]
)
def test_later_job_of_a_finished_run(
    tmp_path: Path, what: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later job of a run that is over ends at once."""
    job = make(tmp_path / "run")
    if what == "finished":
        write_summary(job.root, Summary("finished", 0, 5, 5, 5, 1.0))
    else:
        (job.root / what).touch()
    monkeypatch.setattr(batch_run, "run_job", lambda *_, **__: pytest.fail("it started the run"))
    batch_run.run_in_job(job, Allocation("12"))  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert said in err and "do for job 12 of the chain" in err
    assert read_job(job.root).job_id == "11"


def test_near_its_limit_a_job_of_a_chain_hands_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, allocation = make(tmp_path / "run"), Allocation("11")
    batch_run._requeue(job, allocation, "the time limit is near")  # type: ignore[arg-type]
    assert "job 12 of the chain continues" in capsys.readouterr().err
    assert allocation.requeued == 0 and read_job(job.root).job_id == "12"
    assert json.loads((job.root / "state.json").read_text())["phase"] == "requeued"


def test_a_chain_without_headway_comes_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make(tmp_path / "run", chain=[str(n) for n in range(11, 21)])
    monkeypatch.setattr(batch_run, "run_job", lambda *_, **__: 0)
    for number in range(11, 16):
        batch_run.run_in_job(job, Allocation(str(number)))  # type: ignore[arg-type]
    with pytest.raises(HpcrlError, match="5 restarts without a new"):
        batch_run.run_in_job(job, Allocation("16"))  # type: ignore[arg-type]


def test_chained_job_waits_for_the_one_before() -> None:
    """The script of a chained job waits for the job before, however that ended."""

    site = SiteProfile(exclude=["node3", "node7"], after="5")
    request = make_request([Options(actor_num_gpus_per_node=1)], site)
    text = render(BatchScript("n", "t", "s", "true", "o.out", "/l", follows="4711"), request, site)
    assert "#SBATCH --dependency=afterany:4711\n" in text and "afterok" not in text
    assert text.count("#SBATCH --exclude=node3,node7\n") == len(request.components)


# ---- hosts that broke


@pytest.mark.parametrize(
    ("line", "hardware"),
    [
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", True),
        ("[ 12.3] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", False),
        ("CUDA error: an illegal memory access was encountered", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("NCCL WARN Timeout", False),
        ("prompt: what does 'uncorrectable ECC error' mean, and when is a GPU lost?", False),
        ("what():  CUDA error: uncorrectable NVLink error detected during the execution", True),
    ],
)
def test_only_hardware_words_mark_a_host(line: str, hardware: bool) -> None:
    """Only words of broken hardware mark a host as broken."""
    assert bool(hardware_words(f"before\n{line}\nafter")) == hardware


ECC = "CUDA error: uncorrectable ECC error encountered"


def broken(job: RunJob, role: str = "trainer", index: int = 1) -> RunDir:
    rundir = RunDir(job.root)
    rundir.make_attempt()
    plan = Plan("id", 0, (Location("n1", (0,)), Location("n2", (0,))), (Location("n3", (0,)),), Location("n3", ()))
    rundir.plan_file.write_bytes(msgspec.json.encode(plan))
    rundir.fail(role, index, f"ended with exit code 1; it says: {ECC}; its log is there")
    return rundir


@pytest.mark.parametrize(("role", "index", "host"), [("trainer", 1, "n2"), ("engine", 0, "n3"), ("rollout", 0, "")])
def test_the_host_of_the_role_that_failed(tmp_path: Path, role: str, index: int, host: str) -> None:
    """By the words of its error; whatever stands in its log, or in that of another, marks none."""
    rundir = broken(make(tmp_path / "run"), role, index)
    found = find_broken_host(rundir, read_plan(rundir))
    assert (found[0] if found else "") == host and (found is None or ECC in found[1])
    (rundir.here / "error.json").unlink()
    for name in ("trainer-0", "trainer-1", "engine-0"):
        (rundir.logs / f"{name}.log").write_text(f"{ECC}\n")
    rundir.fail(role, index, "was killed by SIGABRT")
    assert find_broken_host(rundir, read_plan(rundir)) is None


@pytest.mark.parametrize("chain", [["11", "12", "13"], []])
def test_broken_host_is_left_out(
    tmp_path: Path, chain: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start leaves a broken host out and says so."""
    job = make(tmp_path / "run", chain=chain, site={"name": "s"})

    def fails(*_: Any, **__: Any) -> int:
        broken(job)
        raise PeerError("trainer-1: ended with exit code 1")

    monkeypatch.setattr(batch_run, "run_job", fails)
    monkeypatch.setenv("HPCRL_MAX_REQUEUES", "0" if chain else "3")
    allocation = Allocation("11")
    with pytest.raises(PeerError):
        batch_run.run_in_job(job, allocation)  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert ("host n2" in err and "this run's next starts" in err) and "uncorrectable ECC" in err
    assert broken_hosts(job.root) == ["n2"] and allocation.requeued == 0
    if chain:
        assert (
            allocation.left_out == [("12", ["n2"]), ("13", ["n2"])]
            and not allocation.submitted
            and "job 12 of the chain continues" in err
        )
    else:
        assert allocation.submitted == [job.root] and "job 21 continues without it" in err


def test_ever_new_broken_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that meets ever new broken hosts is not restarted for ever."""
    job = make(tmp_path / "run", chain=[], site={"name": "s"})
    (job.root / "broken-hosts.json").write_text(json.dumps({"a": "x", "b": "y"}))
    monkeypatch.setenv("HPCRL_MAX_REQUEUES", "1")
    allocation = Allocation("11")
    allocation.restarts = 1
    batch_run._start_elsewhere(job, allocation, "b", "y")  # type: ignore[arg-type]
    assert "1 of 1 requeues are used up" in capsys.readouterr().err and allocation.requeued == 0
    assert not allocation.submitted


@pytest.mark.parametrize(
    ("error", "lost", "requeues", "ends"),
    [
        (PeerError("trainer-0: peer gone"), {}, "2", "failed"),
        (PeerError("trainer-0: peer gone"), {"n1": "down"}, "2", "requeued"),
        (PeerError("trainer-0: peer gone"), {"n1": "down"}, "0", "failed"),
        (Stopped("saved"), {}, "2", "stopped"),
    ],
)
def test_no_last_word_before_it_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: HpcrlError, lost: dict[str, str], requeues: str, ends: str
) -> None:
    """While the scheduler is asked who was lost, a run that may be queued again is at work to who looks."""
    job = make(tmp_path / "run", chain=[])
    seen = []

    class Asked(Allocation):
        def failed(self, hosts: Sequence[str], since: float, until: float) -> dict[str, str]:
            seen.append(json.loads((job.root / "state.json").read_text())["phase"])
            assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, "Slurm's warning comes now"
            return lost

        def preempted(self) -> bool:
            self.failed((), 0, 0)
            return False

    def run(job: RunJob, *_: Any, judged: bool, **__: Any) -> None:
        with JobStateFile(job.root, judged=judged) as state:
            state.set("running", attempt=0)
            rundir = RunDir(job.root)
            rundir.make_attempt()
            rundir.fail("trainer", 0, "peer gone")
            plan = Plan("id", 0, (Location("n1", (0,), "n1", "lo"),), (), Location("n1", (), "n1", "lo"))
            rundir.plan_file.write_bytes(msgspec.json.encode(plan))
            (rundir.here / HOSTS).write_bytes(msgspec.json.encode([Host("n1", 1, "n1", "lo")]))
            raise error

    monkeypatch.setattr(batch_run, "run_job", run)
    monkeypatch.setattr(batch_run, "PARTING", 0.0)
    monkeypatch.setenv("HPCRL_MAX_REQUEUES", requeues)
    if ends == "stopped":
        batch_run.run_in_job(job, Asked("11"))
    else:
        with pytest.raises(PeerError):
            batch_run.run_in_job(job, Asked("11"))
    assert set(seen) == {"saving"}
    state = json.loads((job.root / "state.json").read_text())
    assert state["phase"] == ends, state


def test_signs_of_life_while_it_is_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler may take minutes to say who was lost."""
    monkeypatch.setattr(job_files, "BEAT", 0.05)
    with pytest.raises(PeerError), JobStateFile(tmp_path, judged=True):
        raise PeerError("gone")
    before = json.loads((tmp_path / "state.json").read_text())
    with judging(tmp_path):
        deadline = time.monotonic() + 20
        while (now := json.loads((tmp_path / "state.json").read_text()))["time"] == before["time"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        JobStateFile(tmp_path).set("requeued")
        time.sleep(0.2)
    assert now == before | {"time": now["time"]}
    assert json.loads((tmp_path / "state.json").read_text())["phase"] == "requeued", "its word stays"


def test_the_state_of_another_launcher_stays(tmp_path: Path) -> None:
    """A second start in a directory that is in use fails, and the first works on."""
    state = JobState("running", time.time(), host="elsewhere", pid=os.getpid())
    write_state(tmp_path, state)
    settle(tmp_path, PeerError("in use"))
    assert json.loads((tmp_path / "state.json").read_text())["phase"] == "running"


def test_no_other_job_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even without the host that broke: the new job would not know of it."""
    job = make(tmp_path / "run", chain=[], site={"name": "s"})

    def fails(*_: Any, **__: Any) -> int:
        broken(job)
        (job.root / STOP).touch()
        raise PeerError("trainer-1: ended with exit code 1")

    monkeypatch.setattr(batch_run, "run_job", fails)
    monkeypatch.setenv("HPCRL_MAX_REQUEUES", "20")
    allocation = Allocation("11")
    with pytest.raises(PeerError):
        batch_run.run_in_job(job, allocation)  # type: ignore[arg-type]
    assert broken_hosts(job.root) and not allocation.submitted
