"""How often a job is queued again, and which options a run that has begun may be given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.allocation import AlreadyRequeued
from hpcrl.launch.batch_run import _requeue, refuse_other_options
from hpcrl.launch.job import RunJob, reopen_job
from hpcrl.run.started_runs import RecipeFile, write_recipe_file


class FakeAllocation:
    """An allocation that notes a requeue, or refuses it."""

    job_id = "7"

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
