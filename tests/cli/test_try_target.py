"""What is tried: which stage of a recipe, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.cli.try_target import of_recipe
from hpcrl.errors import UsageError

STAGES = """
hf_checkpoint = "{prepared}/model"
prompt_data = "train.jsonl"
label_key = "label"
actor_num_gpus_per_node = 1
rollout_num_gpus = 2
n_samples_per_prompt = 4
num_rollout = 1
prepare = [["{python}", "-c", "import pathlib; pathlib.Path('{prepared}/model').mkdir(parents=True)"]]
[[stage]]
name = "sft"
loss_type = "sft_loss"
rollout_num_gpus = 0
[[stage]]
name = "grpo"
rm_type = "math"
lr = 1e-5
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "two.toml"
    path.write_text(STAGES)
    return path


def test_the_last_stage_that_samples_is_tried(recipe: Path) -> None:
    """Its model is made once, in a directory that only the user enters; it is one engine of no run."""
    target = of_recipe(recipe, {})
    assert target.description == "two.toml, stage grpo" and target.options.lr == 1e-5
    assert target.options.rollout_num_gpus == target.options.rollout_num_gpus_per_engine == 1
    model = Path(target.options.hf_checkpoint or "")
    assert model.is_dir() and target.folder.stat().st_mode & 0o777 == 0o700
    (model / "mark").touch()
    again = of_recipe(recipe, {"grpo.lr": 2e-5})
    assert again.options.lr == 2e-5 and again.folder != target.folder, "other settings may prepare another model"
    assert of_recipe(recipe, {}).folder == target.folder and (model / "mark").exists()


@pytest.mark.parametrize("stage", ["sft", "nope"])
def test_a_stage_that_samples_nothing_is_refused(recipe: Path, stage: str) -> None:
    with pytest.raises(UsageError, match=rf"--stage {stage}.*grpo"):
        of_recipe(recipe, {}, stage)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["try", "none.toml"], "none.toml"),
        (["try", "two.toml", "--prompts", "0"], "--prompts 0"),
        (["try", "two.toml", "--promts", "1"], "--prompts"),
    ],
)
def test_wrong_usage(
    argv: list[str], named: str, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(recipe.parent)
    assert main(argv) == 2
    assert named in capsys.readouterr().err


def test_help_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "--help"]) == 0
    assert "usage: hpcrl try" in capsys.readouterr().out
