"""`hpcrl init`: what it writes, that it resolves as it is, and what it refuses; tests/whole_runs/test_first_steps.py
trains in such folders."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hpcrl.cli import init as module
from hpcrl.cli import launch
from hpcrl.cli.init import TASKS, not_installed, write_folder
from hpcrl.cli.main import main
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import missing_functions
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.errors import UsageError
from hpcrl.run.started_runs import RECIPE


def stages_of(folder: Path) -> list[Options]:
    return resolve_stages(load_recipe(folder / "recipe.toml"), {}, {"run": "r", "prepared": "r/prepared"})


def options_of(folder: Path) -> Options:
    return stages_of(folder)[0]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("task", TASKS)
def test_a_folder_is_whole(task: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recipe that resolves and finds its functions and data, twenty rows or more, a README of ten lines, tests that pass."""
    assert main(["init", "mine", "--task", task]) == 0
    said = capsys.readouterr()
    assert "cd mine" in said.out and said.out.rstrip().endswith("hpcrl run")
    folder = home / "mine"
    options = options_of(folder)
    assert options.name == "mine" and options.prompt_data.split("@")[0] == str(folder / "train.jsonl")
    assert missing_functions(options) == []
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert len(rows) == (500 if task == "sft-grpo" else 20)
    assert all(options.input_key in row and options.label_key in row for row in rows)
    assert len((folder / "README.md").read_text().splitlines()) <= 10
    (test,) = folder.glob("test_*.py")
    assert f"python {test.name}" in said.out and f"python {test.name}" in (folder / "README.md").read_text()
    done = subprocess.run([sys.executable, test.name], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.count(": good") == len(
        re.findall(r"^def test_", test.read_text(), re.M)
    )
    assert "examples/" not in (folder / "recipe.toml").read_text()


@pytest.mark.parametrize("task", TASKS)
def test_a_model_of_ones_own(task: str, home: Path) -> None:
    """--model takes the place of the tiny model and its settings; nothing is prepared, and no line is left open."""
    (home / "qwen").mkdir()
    (home / "qwen" / "config.json").write_text("{}")
    folder = write_folder(Path("mine"), task, "qwen")
    recipe, options = load_recipe(folder / "recipe.toml"), options_of(folder)
    assert recipe.prepare == () and options.hf_checkpoint == str(home / "qwen") and options.lr == 1e-6
    assert (
        "tiny" not in (folder / "recipe.toml").read_text() and "of your own" not in (folder / "recipe.toml").read_text()
    )
    if task == "dpo":
        assert options.ref_load == options.hf_checkpoint
    for stage in stages_of(folder):
        assert stage.lr == 1e-6 and (not stage.needs_engines or stage.rollout_max_response_len == 1024)


def test_a_name_of_any_letters(home: Path) -> None:
    folder = write_folder(Path('caf\u00e9 "1"'), "math", None)
    assert tomllib.loads((folder / "recipe.toml").read_text())["name"] == 'caf\u00e9 "1"'


def test_nothing_is_overwritten(home: Path) -> None:
    (home / "there").mkdir()
    with pytest.raises(UsageError, match="there exists already"):
        write_folder(Path("there"), "math", None)
    with pytest.raises(UsageError, match="--model nowhere: .*config.json"):
        write_folder(Path("new"), "math", "nowhere")
    (home / "file").touch()
    with pytest.raises(UsageError, match="cannot make file/new"):
        write_folder(Path("file/new"), "math", None)
    assert {path.name for path in home.iterdir()} == {"there", "file"}
    assert main(["init", "new", "--task", "maths"]) == 2


def test_what_is_not_installed_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line that says how to get it; fine-tuning needs no vLLM."""
    monkeypatch.setattr(module, "_NEEDED", ("json", "vllm_is_not_here", "vllm"))
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if "vllm" in name else name)
    assert not_installed("math") == ["vllm_is_not_here", "vllm"] and not_installed("sft") == ["vllm_is_not_here"]
    assert main(["init", "mine"]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert "vllm" in line and "hpcrl[gpu]" in line and "make env" in line


@pytest.mark.parametrize(
    "words",
    [
        *[["run", "--dry-run"], ["plan"], ["submit", "--dry-run"], ["launch", "--hostfile", "hosts", "--print"]],
        *[["rehearse"], ["try"], ["eval", "--dry-run"]],
    ],
    ids=lambda words: words[0],
)
def test_the_recipe_that_is_here_is_taken(home: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """recipe.toml of the current directory, said in one line, but not the copy in a run directory; never besides one that
    is named."""
    assert main(words) == 2
    assert f"hpcrl {words[0]} RECIPE.toml" in (said := capsys.readouterr().err) and "hpcrl init NAME" in said
    (home / "recipe.toml").write_text("lr = 1\nnot_an_option = 2\n")
    assert main(words) == 2
    told, wrong = capsys.readouterr().err.splitlines()
    assert told.startswith("hpcrl: the recipe is recipe.toml") and "recipe.toml: not_an_option" in wrong
    assert main([*words, "a.toml", "b.toml"]) == 2 and "more than one recipe: a.toml b.toml" in capsys.readouterr().err
    (home / RECIPE).write_text("{}")
    assert main(words) == 2 and "no recipe given" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "plan", "submit", "launch", "try", "eval", "rehearse", "doctor"])
def test_a_folder_stands_for_its_recipe(home: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As in Python; a run directory has a copy of its recipe, which is not meant."""
    (home / "mine").mkdir()
    (home / "mine" / "recipe.toml").write_text("not_an_option = 2\n")
    assert main([command, "mine"]) == 2
    assert "recipe.toml: not_an_option" in capsys.readouterr().err
    (home / "mine" / RECIPE).write_text("{}")
    assert main([command, "mine"]) == 2 and "not_an_option" not in capsys.readouterr().err


def test_ranks_are_told_the_recipe(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What mpirun gets names it: what directory a rank is in is another's affair."""
    (home / "recipe.toml").write_text("lr = 1.0\n")
    called = list[list[str]]()
    monkeypatch.setattr(launch, "call_mpirun", lambda argv, *_: called.append(argv) or 0)
    assert main(["launch", "--hostfile", "hosts"]) == 0
    assert called == [["recipe.toml", "--hostfile", "hosts"]]
