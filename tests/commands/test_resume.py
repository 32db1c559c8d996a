"""`hpcrl resume` for longer and from an earlier checkpoint, of a run of several adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.adapters.run_directories import AdapterDir
from hpcrl.commands.resume import extend_run, rewind_run
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, Stage
from hpcrl.config.rules.several_adapters import adapter_options
from hpcrl.errors import UsageError
from hpcrl.launch.job import RunJob
from hpcrl.run.role import read_options
from hpcrl.run.rundir import RunDir
from hpcrl.run.summary import Summary, read_summary, write_summary
from tests.support.options import GRPO

DONE = {"a": 3, "b": 5}


def of_two(tmp_path: Path, **own: Any) -> tuple[RunJob, RunDir]:
    """A finished run of two adapters, the second one longer, and the checkpoints of both."""
    rundir = RunDir.create(tmp_path / "run")
    options = Options(**GRPO | {"lora_rank": 4, "num_rollout": 3, "adapter": {"a": own, "b": {"num_rollout": 5}}})
    rundir.options_file.write_text(options.model_dump_json())
    for name, adapter in adapter_options(options).items():
        place, done = AdapterDir(rundir, name), DONE[name]
        place.make(adapter)
        for number in range(1, done + 1):
            (place.checkpoints / f"iter_{number:07d}").mkdir()
        write_summary(place.root, Summary("finished", 0, done, done, done, 1.0))
    write_summary(rundir.root, Summary("finished", 0, 8, 8, 8, 1.0))
    return RunJob(Recipe("r", tmp_path / "r.toml", {}, (), (Stage("", {}),)), {}, rundir.root, "identity"), rundir


def test_every_adapter_is_trained_for_longer(tmp_path: Path) -> None:
    job, rundir = of_two(tmp_path)
    with pytest.raises(UsageError, match="adapter b: --num-rollout 4: 5 rollouts are done"):
        extend_run(job, 4)
    extend_run(job, 7)
    longer = adapter_options(read_options(rundir))
    assert [own.num_rollout for own in longer.values()] == [7, 7]
    found = [read_summary(place) for place in (rundir.root, *(AdapterDir(rundir, name).root for name in longer))]
    assert [(one.status, one.rollout_id, one.total) for one in found if one] == [
        ("stopped", 8, 14),
        ("stopped", 3, 7),
        ("stopped", 5, 7),
    ]


def test_an_adapters_own_schedule_is_not_stretched(tmp_path: Path) -> None:
    job, rundir = of_two(tmp_path, lr_decay_style="linear")
    with pytest.raises(UsageError, match="adapter a: --num-rollout 7: --lr-decay-style linear was laid out") as raised:
        extend_run(job, 7)
    assert f"--load {AdapterDir(rundir, 'a').checkpoints}" in str(raised.value)
    assert read_options(rundir).num_rollout == 3


def test_every_adapter_goes_back(tmp_path: Path) -> None:
    """To a checkpoint that all of them have; else nothing changes."""
    job, rundir = of_two(tmp_path)
    with pytest.raises(UsageError, match="is finished; give --num-rollout N as well"):
        rewind_run(job, 2)
    with pytest.raises(UsageError, match="adapter a: --ckpt-step 4: .* no such"):
        extend_run(job, 6, 4)
    assert read_options(rundir).num_rollout == 3, "nothing has changed"
    extend_run(job, 4, 2)
    trackers = [AdapterDir(rundir, name).checkpoints / "latest_checkpointed_iteration.txt" for name in DONE]
    with pytest.raises(UsageError, match="adapter a: --ckpt-step 4: .*/adapters/a/checkpoints has no such.*1, 2, 3"):
        rewind_run(job, 4)
    assert not any(tracker.exists() for tracker in trackers)
    rewind_run(job, 2)
    assert [tracker.read_text() for tracker in trackers] == ["2", "2"]
