"""A host that the scheduler lost stands as the attempt's error, which those have seen first who were ended with it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.config.recipe import Recipe, Stage
from hpcrl.errors import PeerError
from hpcrl.launch import batch_run
from hpcrl.launch.job import RunJob
from hpcrl.launch.requeue import UNNOTICED, explain_last_end
from hpcrl.plan import Host
from hpcrl.run.job_files import JobState, write_state
from hpcrl.run.rundir import HOSTS, RunDir, write_atomic

LAST = 1795393000.0  #: the last word of the launcher before, unix time
ECHO = "host node2 was told to end by SIGTERM"


class Allocation:
    """A scheduler that knows when hosts failed."""

    job_id = "7"

    class backend:
        count = 2
        silent = staticmethod(lambda seconds: pytest.fail("nobody has to be asked"))

    def __init__(self, restarts: int = 1, **failed: float) -> None:
        self.restarts = restarts
        self.known = failed
        self.requeued = 0

    def ends(self) -> float | None:
        return None

    def preempted(self) -> bool:
        return False

    def failed(self, hosts: Sequence[str], since: float, until: float) -> dict[str, str]:
        return {host: "it is down" for host in hosts if since <= self.known.get(host, 0.0) <= until}

    def requeue(self) -> None:
        self.requeued += 1


@pytest.fixture
def job(tmp_path: Path) -> RunJob:
    """A run over node1 and node2 whose only attempt began 500 s ago; its launcher's last word was that it ran."""
    rundir = RunDir.create(tmp_path / "run")
    (rundir.root / "options.json").write_text("{}")
    rundir.make_attempt()
    write_atomic(rundir.here / HOSTS, msgspec.json.encode([Host("node1", 8), Host("node2", 8)]))
    os.utime(rundir.here / HOSTS, (LAST - 400, LAST - 400))
    write_state(rundir.root, JobState("running", LAST))
    return RunJob(Recipe("r", tmp_path / "r.toml", {}, (), (Stage("", {}),)), {}, rundir.root, "identity")


def error(job: RunJob) -> str:
    return str(RunDir(job.root).failure() or "")


@pytest.mark.parametrize("first", ["", ECHO])
def test_lost_launcher_host_is_explained_later(job: RunJob, first: str) -> None:
    """The loss of the launcher's host is explained by the next launcher."""
    if first:
        RunDir(job.root).fail("trainer", 1, first)
    explain_last_end(job, Allocation(node1=LAST + 300))  # type: ignore[arg-type]
    seen = f" (first seen as: trainer-1: {ECHO})" if first else ""
    assert error(job) == f"host node1 was lost (it is down){seen}"


@pytest.mark.parametrize("when", [LAST - 401, LAST + UNNOTICED + 1], ids=["before", "long after"])
def test_host_failure_at_another_time(job: RunJob, when: float) -> None:
    """A host that failed before or long after is not the cause."""
    RunDir(job.root).fail("trainer", 1, ECHO)
    explain_last_end(job, Allocation(node1=when))  # type: ignore[arg-type]
    assert error(job) == f"trainer-1: {ECHO}"


@pytest.mark.parametrize(
    ("phase", "restarts", "corrected"),
    [
        ("running", 0, True),
        ("failed", 1, True),
        ("stopped", 1, True),
        ("failed", 0, False),
        ("requeued", 1, False),
        ("cancelled", 1, False),
    ],
)
def test_what_the_launcher_ended_itself_keeps_its_word(job: RunJob, phase: Any, restarts: int, corrected: bool) -> None:
    """Unless the scheduler has started the same job again, without being asked to."""
    RunDir(job.root).fail("trainer", 1, ECHO)
    write_state(job.root, JobState(phase, LAST))
    explain_last_end(job, Allocation(restarts, node1=LAST))  # type: ignore[arg-type]
    assert error(job).startswith("host node1 was lost" if corrected else "trainer-1: host node2")


def test_a_stop_without_an_error_stays_one(job: RunJob) -> None:
    write_state(job.root, JobState("stopped", LAST))
    explain_last_end(job, Allocation(node1=LAST))  # type: ignore[arg-type]
    assert error(job) == ""


def test_message_that_names_the_host(job: RunJob) -> None:
    """A message that already names the host is not wrapped again."""
    RunDir(job.root).fail("launcher", 0, "no answer from node1: is it up, and its network?")
    explain_last_end(job, Allocation(node1=LAST))  # type: ignore[arg-type]
    assert error(job) == "no answer from node1: is it up, and its network?"


def test_another_hosts_longer_name_is_not_this_hosts(job: RunJob) -> None:
    RunDir(job.root).fail("launcher", 0, "no answer from node11: is it up, and its network?")
    explain_last_end(job, Allocation(node1=LAST))  # type: ignore[arg-type]
    assert error(job).startswith("host node1 was lost")


def test_damaged_files_do_not_end_next_start(job: RunJob) -> None:
    """Damage to any file does not end the next start."""
    rundir = RunDir(job.root)
    for path in (rundir.here / "error.json", rundir.here / HOSTS, job.root / "state.json"):
        path.write_text("{")
        explain_last_end(job, Allocation())  # type: ignore[arg-type]


def test_living_launcher_asks_scheduler(job: RunJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that is alive asks the scheduler first."""

    def ended(*_: Any, **__: Any) -> int:
        rundir = RunDir(job.root)
        rundir.fail("trainer", 1, ECHO)
        rundir.check()
        raise AssertionError

    monkeypatch.setattr(batch_run, "run_job", ended)
    monkeypatch.setattr(batch_run, "explain_last_end", lambda *_: None)
    monkeypatch.setattr(batch_run, "PARTING", 0.0)
    monkeypatch.setenv("HPCRL_MAX_REQUEUES", "3")
    allocation = Allocation(0, node1=time.time())
    with pytest.raises(PeerError, match=rf"^host node1 was lost \(it is down\) \(first seen as: trainer-1: {ECHO}\)"):
        batch_run.run_in_job(job, allocation)  # type: ignore[arg-type]
    assert allocation.requeued == 1 and error(job).startswith("host node1 was lost")
