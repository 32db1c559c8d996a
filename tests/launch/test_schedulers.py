"""Schedulers by name: hpcrl's own, one that an installed package adds, and names that lead nowhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.cli import main
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch import scheduler_names
from hpcrl.launch.batch_run import _requeue, refuse_other_options
from hpcrl.launch.job import RunJob, reopen_job
from hpcrl.launch.scheduler import AlreadyRequeued, load_scheduler
from hpcrl.launch.site import SiteProfile, apply, load_site, saved_site
from hpcrl.run.started_runs import RecipeFile, write_recipe_file
from hpcrl.slurm.scheduler import Slurm
from hpcrl.slurm.site import SlurmSite
from tests.support.local_queue import NAME, LocalQueue, register
from tests.support.rundirs import make, put, submitted


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a scheduler is installed, and one with a scheduler that is broken."""
    register(tmp_path / "site-packages")
    broken = tmp_path / "site-packages/broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[hpcrl.schedulers]\nbroken = tests.support.nowhere:Pbs\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site-packages")])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("HPCRL_SITE", raising=False)
    monkeypatch.chdir(tmp_path)
    for cached in (load_scheduler, scheduler_names._installed):
        cached.cache_clear()
    yield tmp_path
    for cached in (load_scheduler, scheduler_names._installed):
        cached.cache_clear()


def test_a_name_leads_to_a_scheduler(installed: Path) -> None:
    assert isinstance(load_scheduler("slurm"), Slurm) and isinstance(load_scheduler(NAME), LocalQueue)
    assert load_scheduler(NAME) is load_scheduler(NAME)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("slrum", "did you mean slurm?"),
        ("local-queu", "did you mean local-queue?"),
        ("flux", "scheduler; there are slurm"),
        (
            "broken",
            "'tests.support.nowhere'; fix or remove",
        ),
        ("tests.support.local_queue:LocalQueue", "is no such scheduler"),
        ("", "is no such scheduler"),
    ],
)
def test_other_names_are_refused(installed: Path, name: str, error: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_scheduler(name)
    assert error in str(caught.value)
    with pytest.raises(UsageError, match="site default: scheduler|sites/default.toml: scheduler"):
        load_site(None, {"scheduler": name})


def test_a_profile_has_the_keys_of_its_scheduler(installed: Path) -> None:
    file = installed / "mine.toml"
    file.write_text(f'scheduler = "{NAME}"\nhold = true\n[trainer]\nmem = "8G"\n')
    site = load_site(str(file))
    assert (site.scheduler, site.hold, site.trainer.mem) == (NAME, True, "8G") and not isinstance(site, SlurmSite)
    for text, error in (
        ('qos = "a"', "qos is an unknown"),
        ('[trainer]\npartition = "a"', "trainer.partition is an unknown key"),
    ):
        file.write_text(f'scheduler = "{NAME}"\n{text}')
        with pytest.raises(UsageError, match=f"mine.toml: {error}"):
            load_site(str(file))
    assert isinstance(load_site(None), SlurmSite) and isinstance(apply(SiteProfile(), {"qos": "a"}), SlurmSite)
    other = apply(SiteProfile(), {"hold": "true", "scheduler": NAME})
    assert other.hold, "whatever the order in which they are given"
    assert saved_site(json.loads(json.dumps(other.model_dump()))) == other
    with pytest.raises(UsageError, match="site in job.json: scheduler gone: there is"):
        saved_site({"scheduler": "gone"})
    (installed / "number.toml").write_text("scheduler = 3")
    with pytest.raises(UsageError, match="number.toml: scheduler = 3:.*should be a valid"):
        load_site(str(installed / "number.toml"))


def test_run_of_a_removed_scheduler(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of a scheduler that is no longer installed can be looked at."""
    root = make(installed / "runs/a", phase="finished")
    submitted(root, "7")
    record = json.loads((root / "job.json").read_text())
    for name in ("gone", "broken", "os:system", "../x"):
        put(root / "job.json", record | {"scheduler": name})
        assert main(["status", "a"]) == 0
        out = capsys.readouterr().out
        assert "runs/a: finished" in out and f"scheduler {name}" in out and "run directory alone" in out
        assert main(["cancel", "a"]) == 2
        assert f"scheduler {name}" in capsys.readouterr().err


def test_each_scheduler_is_asked_once_for_all_runs(
    installed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    for kind in (Slurm, LocalQueue):
        look = kind.look
        monkeypatch.setattr(
            kind, "look", lambda self, keys, look=look: asked.append((self.title, len(keys))) or look(self, keys)
        )
    for number in range(6):
        root = make(installed / f"runs/r{number}")
        submitted(root, "7")
        put(
            root / "job.json",
            json.loads((root / "job.json").read_text()) | {"scheduler": NAME if number % 2 else "slurm"},
        )
    make(installed / "runs/local", phase="finished")
    assert main(["status"]) == 0
    assert sorted(asked) == [("Queue", 3), ("Slurm", 3)]
    assert "not here to say" in capsys.readouterr().out


# ---- queued again


class FakeAllocation:
    """An allocation that notes a requeue, or refuses it."""

    title, job_id = "Queue", "7"

    def __init__(self, restarts: int, error: HpcrlError | None = None) -> None:
        self.restarts = restarts
        self.error = error
        self.asked = 0

    def requeue(self) -> None:
        self.asked += 1
        if self.error:
            raise self.error


@pytest.mark.parametrize(
    ("restarts", "error", "asked", "phase", "said"),
    [
        (0, None, 1, "requeued", "no time; queued again (1 of 2 requeues)"),
        (2, None, 0, None, "not queued again: 2 of 2 requeues are used up"),
        (1, HpcrlError("no"), 1, "stopped", "continue with hpcrl resume"),
        (1, AlreadyRequeued("being done"), 1, "requeued", "again by itself (being"),
    ],
)
def test_requeue_limit_and_refusal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    restarts: int,
    error: HpcrlError | None,
    asked: int,
    phase: str | None,
    said: str,
) -> None:
    """A job is requeued up to its limit, and a refusal is reported."""
    monkeypatch.setenv("HPCRL_MAX_REQUEUES", "2")
    monkeypatch.setattr("hpcrl.launch.batch_run.PARTING", 0.0)
    allocation = FakeAllocation(restarts, error)
    _requeue(RunJob(None, {}, tmp_path, "id"), allocation, "no time")  # type: ignore[arg-type]
    assert allocation.asked == asked and said in capsys.readouterr().err
    state = tmp_path / "state.json"
    assert (json.loads(state.read_text())["phase"] if state.exists() else None) == phase


def test_other_options_for_a_run_that_has_begun(tmp_path: Path) -> None:
    """They would have no effect; another spelling of its directory is no other option."""
    path = tmp_path / "recipe.toml"
    path.write_text('loss_type = "sft_loss"\n')
    root = tmp_path / "run"
    root.mkdir()
    write_recipe_file(root, RecipeFile("id", str(path), {"run_dir": "runs/q-5", "lr": 1e-3}), path.read_text())
    job = reopen_job(root)
    for spelling in ("runs/q-5", str(root)):
        refuse_other_options(job, {"run_dir": spelling, "lr": 1e-3})
    for other in ({"lr": 1e-4}, {}, {"lr": 1e-3, "seed": 7}):
        with pytest.raises(UsageError, match="began with other options"):
            refuse_other_options(job, {"run_dir": str(root)} | other)
