"""`hpcrl resume` for longer, from an earlier checkpoint and in another layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.cli.resume import extend_run, rewind_run
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, Stage, load_recipe
from hpcrl.errors import UsageError
from hpcrl.launch.job import RunJob, reopen_job
from hpcrl.run.role import read_options
from hpcrl.run.rundir import RunDir
from hpcrl.run.started_runs import RecipeFile, write_recipe_file
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


# ---- in another layout


def begun(tmp_path: Path, text: str, **flags: Any) -> Path:
    """A run directory of a recipe that is at its last stage, as its processes leave it."""
    (tmp_path / "r.toml").write_text(text)
    recipe, root = load_recipe(tmp_path / "r.toml"), tmp_path / "run"
    RunDir.create(root)
    write_recipe_file(root, RecipeFile("identity", str(recipe.path), flags), text)
    job = reopen_job(root)
    for stage, options in zip(job.recipe.stages, job.stages, strict=True):
        job.directory(stage).mkdir(exist_ok=True)
        (job.directory(stage) / "options.json").write_text(options.model_dump_json())
        if stage != job.recipe.stages[-1]:
            write_summary(job.directory(stage), Summary("finished", 0, 3, 3, 3, 1.0))
    return root


TWO_RANKS = """
loss_type = "sft_loss"
label_key = "label"
hf_checkpoint = "nowhere"
rollout_num_gpus = 0
prompt_data = "p.jsonl"
num_rollout = 3
actor_num_gpus_per_node = 2
tensor_model_parallel_size = 2
sequence_parallel = true
use_dynamic_batch_size = true
max_tokens_per_gpu = 4096
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The runs that would have been started here."""
    found: list[Path] = []
    monkeypatch.setattr("hpcrl.launch.local.run_recipe", lambda recipe, flags, root: found.append(root) or 0)
    return found


def test_layout_changes_for_good(tmp_path: Path, started: list[Path]) -> None:
    """What the run had meanwhile stays, and the next resume keeps the change."""
    root = begun(tmp_path, TWO_RANKS)
    options = read_options(RunDir(root)).model_copy(update={"num_rollout": 7, "max_tokens_per_gpu": 2048})
    (root / "options.json").write_text(options.model_dump_json())
    flags = "--tensor-model-parallel-size 1 --max-tokens-per-gpu 4096 --recompute-granularity selective"
    assert main(["resume", str(root), *flags.split()]) == 0 and started == [root]
    for _ in range(2):
        now, asked = read_options(RunDir(root)), reopen_job(root).stages[0]
        for one in (now, asked):
            assert (one.tensor_model_parallel_size, one.data_parallel_size, one.sequence_parallel) == (1, 2, False)
            assert (one.max_tokens_per_gpu, one.megatron) == (4096, {"recompute_granularity": "selective"})
        assert now.num_rollout == 7
        assert main(["resume", str(root)]) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--tensor-model-parallel-size 3", "2 trainer ranks .* cannot be divided by TP x PP x CP = 3"),
        ("--context-parallel-size 1 --lr 1e-4", "--lr=0.0001: .* keeps this option; .*r.toml --load .*run --lr=0.0001"),
        ("--max-tokens-per-gpu 0", "expected"),
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "3 cannot be divided"),
        ("--time 1:00:00", "--time has no effect: .* was not submitted"),
        ("--grpo.context-parallel-size 1", "r.toml has no stages"),
    ],
)
def test_refused_layouts_change_nothing(
    tmp_path: Path, started: list[Path], capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    root = begun(tmp_path, TWO_RANKS)
    before = {path: path.read_bytes() for path in root.glob("*.json")}
    assert main(["resume", str(root), *flags.split()]) == 2
    assert re.search(said, capsys.readouterr().err) and not started
    assert {path: path.read_bytes() for path in root.glob("*.json")} == before


def test_layout_of_the_stage_at_work(tmp_path: Path, started: list[Path]) -> None:
    """A plain flag counts also where the run began with one for this stage; a finished stage keeps its options."""
    text = TWO_RANKS + '[[stage]]\nname = "a"\n[[stage]]\nname = "b"\n'
    root = begun(tmp_path, text, **{"b.tensor_model_parallel_size": 1, "b.sequence_parallel": False})
    assert main(["resume", str(root), "--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node", "4"]) == 0
    first, second = (read_options(RunDir(root / stage)) for stage in ("a", "b"))
    assert (first.world_size, second.world_size, second.data_parallel_size) == (2, 4, 2)
    assert reopen_job(root).stages[1].data_parallel_size == 2
