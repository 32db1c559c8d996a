"""`hpcrl resume` for longer and from an earlier checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.resume import extend_run, rewind_run
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, Stage
from hpcrl.errors import UsageError
from hpcrl.launch.job import RunJob
from hpcrl.run.role import read_options
from hpcrl.run.rundir import RunDir
from hpcrl.run.summary import Summary, read_summary, write_summary
from tests.support.options import GRPO


def finished(tmp_path: Path, **values: Any) -> tuple[RunJob, RunDir]:
    """A finished run of three rollouts, and its checkpoints."""
    rundir = RunDir.create(tmp_path / "run")
    options = Options(**GRPO | {"num_rollout": 3} | values)
    rundir.options_file.write_text(options.model_dump_json())
    for number in range(1, 4):
        (rundir.checkpoints / f"iter_{number:07d}").mkdir()
    write_summary(rundir.root, Summary("finished", 0, 3, 3, 3, 1.0))
    return RunJob(Recipe("r", tmp_path / "r.toml", {}, (), (Stage("", {}),)), {}, rundir.root, "identity"), rundir


def test_a_run_is_trained_for_longer(tmp_path: Path) -> None:
    job, rundir = finished(tmp_path)
    with pytest.raises(UsageError, match="--num-rollout 3: 3 rollouts are done"):
        extend_run(job, 3)
    extend_run(job, 7)
    assert read_options(rundir).num_rollout == 7
    found = read_summary(rundir.root)
    assert found and (found.status, found.rollout_id, found.total) == ("stopped", 3, 7)


def test_a_schedule_is_not_stretched(tmp_path: Path) -> None:
    job, rundir = finished(tmp_path, lr_decay_style="linear")
    with pytest.raises(UsageError, match="--num-rollout 7: --lr-decay-style linear was planned for") as raised:
        extend_run(job, 7)
    assert f"--load {rundir.checkpoints}" in str(raised.value)
    assert read_options(rundir).num_rollout == 3


def test_a_run_goes_back(tmp_path: Path) -> None:
    """To a checkpoint that there is; else nothing changes."""
    job, rundir = finished(tmp_path)
    with pytest.raises(UsageError, match="is finished; give --num-rollout N too"):
        rewind_run(job, 2)
    with pytest.raises(UsageError, match="--ckpt-step 4: .* no such"):
        extend_run(job, 6, 4)
    assert read_options(rundir).num_rollout == 3, "nothing has changed"
    extend_run(job, 4, 2)
    tracker = rundir.checkpoints / "latest_checkpointed_iteration.txt"
    with pytest.raises(UsageError, match="--ckpt-step 4: .*/checkpoints has no such.*1, 2, 3"):
        rewind_run(job, 4)
    assert not tracker.exists()
    rewind_run(job, 2)
    assert tracker.read_text() == "2"
