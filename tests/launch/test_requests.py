"""What a user asks of a run while it comes up is heeded; what was asked of a launcher before it is not."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe
from hpcrl.errors import HpcrlError, Stopped
from hpcrl.launch import job as jobs
from hpcrl.launch.job import RunJob, run_job
from hpcrl.launch.local import Local
from hpcrl.launch.mpi import exit_status_relay
from hpcrl.plan import Host
from hpcrl.run.job_files import CANCEL, STOP, JobState, forget_old_requests, process_age, write_job, write_state
from hpcrl.run.rundir import RunDir
from tests.support.rundirs import put


def put_at(path: Path, seconds: float) -> None:
    """Have a file that was written so many seconds ago."""
    path.touch()
    os.utime(path, (time.time() - seconds,) * 2)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "lock").write_text("1")
    return tmp_path


@pytest.mark.parametrize("name", [STOP, CANCEL])
@pytest.mark.parametrize(
    ("asked", "age", "restarts", "kept"),
    [
        pytest.param(200, 300, 0, True, id="while this start came up"),
        pytest.param(400, 300, 0, False, id="of the launcher before, which a user's new start follows"),
        pytest.param(
            400, 300, 1, True, id="of the launcher before, which was killed, and a start of the scheduler's own follows"
        ),
    ],
)
def test_what_is_heeded(root: Path, name: str, asked: float, age: float, restarts: int, kept: bool) -> None:
    put_at(root / name, asked)
    forget_old_requests(root, restarts, age)
    assert (root / name).exists() == kept


@pytest.mark.parametrize("phase", ["stopped", "finished", "failed", "cancelled"])
@pytest.mark.parametrize("restarts", [0, 1])
def test_what_was_answered_is_not_heeded_again(root: Path, phase: str, restarts: int) -> None:
    write_state(root, JobState(phase, time.time()))  # type: ignore[arg-type]
    for seconds, kept in ((100, True), (400, False)):
        put_at(root / STOP, seconds)
        put_at(root / "state.json", 200)
        forget_old_requests(root, restarts, 300)
        assert (root / STOP).exists() == kept


def test_requeued_or_killed_did_not_answer(root: Path) -> None:
    """A job that is requeued or was killed has not answered a request."""
    for phase in ("requeued", "running", "saving"):
        write_state(root, JobState(phase, time.time()))  # type: ignore[arg-type]
        put_at(root / STOP, 400)
        forget_old_requests(root, 1, 300)
        assert (root / STOP).exists(), phase
    put(root / "state.json", {"phase": "no phase"})
    forget_old_requests(root, 1, 300)
    assert (root / STOP).exists(), "a damaged file answers nothing"


@pytest.mark.parametrize("site", [{"name": "s"}, None])
def test_a_job_that_hpcrl_submitted_came_up_since_then(root: Path, site: dict[str, str] | None) -> None:
    write_job(root, "x", "slurm", "7", site=site)
    put_at(root / "job.json", 300)
    put_at(root / STOP, 100)
    forget_old_requests(root, 0, 5)
    assert (root / STOP).exists() == (site is not None)


def test_stop_while_the_run_comes_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was told to stop while it came up starts nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(jobs, "adopt_orphans", lambda: None)
    root = tmp_path / "run"
    for folder in ("prepared", "logs", "timeline"):
        (root / folder).mkdir(parents=True)
    recipe = load_recipe("examples/quickstart.toml")
    job = RunJob(recipe, {}, root, "x")
    (root / STOP).touch()
    os.utime(root / STOP, (time.time() - process_age() - 50,) * 2)
    with pytest.raises(Stopped, match=r"stopped (while starting|before stage \w+) \(hpcrl stop\)"):
        run_job(job, Local(), age=process_age() + 100)
    assert not list(root.glob("**/attempts")) and not list((root / "prepared").iterdir())
    assert '"stopped"' in (root / "state.json").read_text()


def test_interruption_names_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted attempt says which run to resume."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(jobs, "adopt_orphans", lambda: None)

    class Ended(Local):
        def hosts(self, options: Options, rundir: RunDir) -> list[Host]:
            os.kill(os.getpid(), signal.SIGINT)
            raise HpcrlError("no host answers")

    root = RunDir.create(tmp_path / "run").root
    recipe = load_recipe("examples/algorithms/dpo.toml")
    with pytest.raises(Stopped, match=f"continue with hpcrl resume {root}$"):
        run_job(RunJob(replace(recipe, prepare=()), {}, root, "x"), Ended())


def test_rank_0_knows_how_long_ago_hpcrl_launch_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(exit_status_relay.ASKED, raising=False)
    assert exit_status_relay.age() == 0
    monkeypatch.setenv(exit_status_relay.ASKED, str(time.time() - 20))
    assert 20 <= exit_status_relay.age() < 60
