"""`hpcrl eval`: what it makes of recipes, runs and checkpoints; and what is refused before a run directory exists."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.evaluate import evaluate, found, recipe_for
from hpcrl.cli.main import main
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, load_recipe, resolve_stages
from hpcrl.errors import DataError, UsageError
from hpcrl.rollout.prompts.first_rows import findings, look_at
from tests.support.able import needs
from tests.support.published_models import MODELS

REPO = Path(__file__).parents[2]
PLACES = {"run": "/run", "prepared": "/run/prepared"}


def options_of(recipe: Recipe, tmp_path: Path, **overrides: Any) -> Options:
    """As the run itself will read them: from the copy of the recipe's text."""
    (tmp_path / "copy.toml").write_text(str(recipe.text))
    again = load_recipe(tmp_path / "copy.toml")
    assert resolve_stages(again, overrides, PLACES) == resolve_stages(recipe, overrides, PLACES)
    (options,) = resolve_stages(again, overrides, PLACES)
    return options


def test_evaluation_drops_training_settings(tmp_path: Path) -> None:
    """A recipe is evaluated without the settings that say how to train."""
    given = {"load": "/somewhere/checkpoints"}
    recipe, _ = recipe_for(REPO / "examples" / "quickstart.toml", given)
    options = options_of(recipe, tmp_path, **given)
    assert (options.num_rollout, options.eval_interval, options.load, options.name) == (
        0,
        1,
        given["load"],
        "quickstart-eval",
    )
    assert (options.n_samples_per_eval_prompt, options.rm_type, options.prompt_data) == (4, "math", None)
    assert options.lr == Options().lr and recipe.prepare
    with pytest.raises(
        UsageError, match="stage grpo of quickstart.toml starts from .*another stage makes; give --load CHECKPOINT"
    ):
        recipe_for(REPO / "examples" / "quickstart.toml", {})


@pytest.mark.parametrize("name", sorted(path.name for path in (REPO / "examples").glob("*.toml")))
def test_every_example_that_evaluates_can_be_evaluated(name: str, tmp_path: Path) -> None:
    given = {"load": "/c", "eval_prompt_data": ["held", "held.jsonl"]}
    options = options_of(recipe_for(REPO / "examples" / name, given)[0], tmp_path, **given)
    assert options.only_evaluates and options.num_engines > 0


def run_dir(path: Path, **values: Any) -> Path:
    """A run that was trained, as far as an evaluation looks at it."""
    base = {
        "hf_checkpoint": "/model",
        "prompt_data": "/p.jsonl",
        "label_key": "a",
        "rm_type": "math",
        "num_rollout": 9,
        "lr": 1e-5,
    }
    base |= {
        "rollout_num_gpus": 1,
        "actor_num_gpus_per_node": 1,
        "n_samples_per_prompt": 4,
        "advantage_estimator": "rloo",
    }
    (path / "checkpoints" / "iter_0000004").mkdir(parents=True)
    (path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    (path / "options.json").write_text(Options(**(base | values)).model_dump_json())
    return path


def test_a_run_its_checkpoints_or_one_of_them(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "r1", vllm={"max_num_seqs": 7}, megatron={"recompute_granularity": "selective"})
    given = {"eval_prompt_data": ["held", "h.jsonl"]}
    for what, step in ((run, None), (run / "checkpoints", None), (run / "checkpoints" / "iter_0000004", 4)):
        options = options_of(recipe_for(what, given)[0], tmp_path, **given)
        assert (options.load, options.ckpt_step) == (str(run / "checkpoints"), step)
        assert (options.hf_checkpoint, options.rm_type, options.vllm) == ("/model", "math", {"max_num_seqs": 7})
        assert options.advantage_estimator == "grpo" and options.num_rollout == 0
    staged = tmp_path / "r2"
    run_dir(staged / "grpo")
    assert options_of(recipe_for(staged, given)[0], tmp_path, **given).load == str(staged / "grpo" / "checkpoints")
    with pytest.raises(UsageError, match="held-out set given; give --eval-prompt-data NAME PATH"):
        recipe_for(run, {})


def test_a_checkpoint_without_a_run_and_a_model(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("4")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    given = {"eval_prompt_data": ["h.jsonl"], "rm_type": "random", "rollout_num_gpus": 1, "actor_num_gpus_per_node": 1}
    options = options_of(recipe_for(tmp_path / "ckpt", given)[0], tmp_path, **given, hf_checkpoint="/m")
    assert options.load == str(tmp_path / "ckpt")
    options = options_of(recipe_for(tmp_path / "model", given)[0], tmp_path, **given)
    assert options.hf_checkpoint == str(tmp_path / "model") and options.load is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no recipe given"),
        (["a", "b"], "recipe: a b"),
        (["absent"], "neither a recipe"),
        (["{here}"], "no Hugging Face model"),
    ],
)
def test_what_cannot_be_evaluated(argv: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        evaluate([word.format(here=tmp_path) for word in argv])


def test_dry_runs_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.cli.submit.can_submit", lambda: False)  # whatever lies on this machine
    run = run_dir(tmp_path / "r1", hf_checkpoint=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-4B"][1]))
    (tmp_path / "h.jsonl").write_text('{"input": "1", "a": "2"}\n')
    argv = [
        "eval",
        str(run),
        "--eval-prompt-data",
        "held",
        str(tmp_path / "h.jsonl"),
        "--run-dir",
        str(tmp_path / "out"),
    ]
    assert main([*argv, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "num_rollout = 0" in shown and "engine" in shown
    assert main([*argv, "--site", "default", "--dry-run"]) == 0
    assert "#SBATCH" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_the_results_are_lines(tmp_path: Path) -> None:
    row = {
        "rollout_id": -1,
        "eval/a/accuracy": 0.5,
        "eval/a/ci_low": 0.25,
        "eval/a/ci_high": 0.75,
        "eval/a/n": 8,
        "eval/a/majority@16": 0.5,
        "eval/a/pass@1": 0.5,
    }
    row |= {"eval/a/pass@2": 0.75, "eval/a/pass@16": 1.0, "eval/a/truncated_ratio": 0.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert found(tmp_path) == [
        "a: 0.500 (0.250 to 0.750), majority@16 0.500, pass@1 0.500, pass@2 0.750, pass@16 1.000, truncated 0.000, 8 "
        "responses"
    ]
    own = {"rollout_id": -1, "eval/b/solved": 3.0, "eval/a/accuracy": 0.5}  # numbers of an own function
    (tmp_path / "metrics.jsonl").write_text(json.dumps(own) + "\n")
    assert found(tmp_path) == ["a: 0.500", "b: solved 3.000"]


# ---- before anything is made


def options(tmp_path: Path, **values: Any) -> Options:
    base = {
        "hf_checkpoint": "m",
        "prompt_data": str(tmp_path / "p.jsonl"),
        "label_key": "label",
        "num_rollout": 1,
        "rm_type": "math",
    }
    return Options(**(base | values))


GOOD = '{"input": "1", "label": "2"}\n'


@pytest.mark.parametrize(
    ("train", "held", "values", "words"),
    [
        (GOOD + '{"input": "1"}\n', GOOD, {}, "p.jsonl, line 2: no key 'label'"),
        ("", GOOD, {}, "p.jsonl holds no prompts"),
        (GOOD, '{"input": "1"}\n', {}, "h.jsonl, line 1: no key 'label'"),
        (GOOD, '{"input": "1", "label": null}\n', {}, "h.jsonl, line 1: 'label' is null"),
        (GOOD, "{\n", {}, "h.jsonl, line 1: not JSON"),
        (GOOD, GOOD, {"eval_label_key": "truth"}, "keys are input, label"),
    ],
)
def test_a_bad_file_is_refused_at_once(
    tmp_path: Path, train: str, held: str, values: dict[str, Any], words: str
) -> None:
    (tmp_path / "p.jsonl").write_text(train)
    (tmp_path / "h.jsonl").write_text(held)
    both = options(tmp_path, eval_interval=1, eval_prompt_data=[str(tmp_path / "h.jsonl")], **values)
    with pytest.raises(DataError) as caught:
        look_at([both])
    assert words in str(caught.value)
    assert next(f.what for f in findings([both]) if f.level == "fail") in str(caught.value)


def test_what_is_not_here_yet_is_left_to_the_run(tmp_path: Path) -> None:
    absent = options(tmp_path, prompt_data=[str(tmp_path / "p.jsonl"), str(tmp_path / "run" / "q.jsonl")])
    look_at([absent])
    assert not list(findings([absent]))
    (tmp_path / "p.jsonl").write_text("{\n" + GOOD)
    look_at([options(tmp_path, prompt_data=f"{tmp_path}/p.jsonl@[1:]")])


def test_missing_inputs_are_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is to be made, or is where this machine cannot look."""
    monkeypatch.setattr("hpcrl.cli.submit.can_submit", lambda: False)
    text = (
        'hf_checkpoint = "/nowhere/model"\nprompt_data = "/nowhere/p.jsonl"\nlabel_key = "label"\nrm_type = '
        '"math"\nnum_rollout = 1\nrollout_num_gpus = 1\nactor_num_gpus_per_node = 1\nn_samples_per_prompt = 2\n'
    )
    (tmp_path / "r.toml").write_text(text)
    (tmp_path / "made.toml").write_text(f'prepare = ["make", "--model=/nowhere/model", "/nowhere/p.jsonl"]\n{text}')
    out = ["--run-dir", str(tmp_path / "out")]
    for command, *words in (["run"], ["run", "--dry-run"], ["submit", "--dry-run"]):
        assert main([command, str(tmp_path / "r.toml"), *out, *words]) == 2
        said = capsys.readouterr().err
        assert (
            "--hf-checkpoint /nowhere/model does not exist here" in said
            and "the prompt file /nowhere/p.jsonl does not exist here" in said
        )
    (tmp_path / "hub.toml").write_text(text.replace("/nowhere/model", "Qwen/Qwen3-0.6B"))
    assert main(["run", str(tmp_path / "hub.toml"), *out]) == 2
    assert "hf download Qwen/Qwen3-0.6B --local-dir DIR" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "made.toml"), *out, "--dry-run"]) == 0
    (tmp_path / "own.toml").write_text(
        (tmp_path / "made.toml").read_text().replace('rm_type = "math"', 'custom_rm_path = "no_such.f"')
    )
    for command, *words in (["run"], ["run", "--dry-run"], ["submit", "--dry-run"]):
        assert main([command, str(tmp_path / "own.toml"), *out, *words]) == 2
        assert (
            "--custom-rm-path no_such.f: there is no module no_such; modules are looked for" in capsys.readouterr().err
        )
    for site in ('setup=["export PYTHONPATH=/there"]', 'env={PYTHONPATH = "/there"}', "python=/other/python"):
        assert main(["submit", str(tmp_path / "own.toml"), *out, "--dry-run", "--set", site]) == 0, site
    for site in (["scratch=/nowhere"], ["after=7"], ["container.kind=pyxis", "container.image=/x.sqsh"]):
        assert main(["submit", str(tmp_path / "r.toml"), *out, "--dry-run", "--set", *site]) == 0, site
    assert main(["submit", str(tmp_path / "r.toml"), *out, "--print"]) == 0, "for another place, perhaps"
    assert not (tmp_path / "out").exists()


def test_no_run_directory_is_made_for_a_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text('{"input": "1"}\n')
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(MODELS["Qwen3-4B"][1]))
    (tmp_path / "r.toml").write_text(
        f'hf_checkpoint = "{tmp_path}/m"\nprompt_data = "{tmp_path}/p.jsonl"\nlabel_key = "label"\nrm_type = '
        '"math"\nnum_rollout = 1\n'
        "rollout_num_gpus = 1\nactor_num_gpus_per_node = 1\nn_samples_per_prompt = 2\n"
    )
    for argv in (["run"], ["run", "--dry-run"], ["submit", "--dry-run"]):
        command, *flags = argv
        assert main([command, str(tmp_path / "r.toml"), "--run-dir", str(tmp_path / "out"), *flags]) == 1
        assert "p.jsonl, line 1: no key 'label'" in capsys.readouterr().err and not (tmp_path / "out").exists()


@needs("root")
@pytest.mark.parametrize("theirs", ["", "options.json"])
def test_options_of_another_user_are_not_taken(theirs: str, tmp_path: Path) -> None:
    """They name functions and set variables such as LD_PRELOAD; the checkpoint alone can be evaluated."""
    run_dir(tmp_path / "run")
    os.chown(tmp_path / "run" / theirs, 4711, 4711)
    for what in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        with pytest.raises(UsageError, match="belongs to user 4711"):
            recipe_for(what, {})
