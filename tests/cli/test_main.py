"""The command: light, clear about errors, and faithful in what it hands on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpcrl import __version__
from hpcrl.cli.main import main
from hpcrl.errors import DataError, Stopped
from tests.support.published_models import MODELS

RECIPE = """
name = "small"
hf_checkpoint = "m"
prompt_data = "p.jsonl"
label_key = "label"
actor_num_gpus_per_node = 1
rollout_num_gpus = 1
[vllm]
max_num_seqs = 8
[[stage]]
name = "sft"
loss_type = "sft_loss"
num_rollout = 2
[[stage]]
name = "grpo"
load = "{run}/sft/checkpoints"
num_rollout = 3
rm_type = "exact"
n_samples_per_prompt = 4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(RECIPE)
    return file


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stands in for hpcrl.launch.local: records the calls and returns 7, or raises what is in `runner.error`."""
    calls: list[tuple[Any, ...]] = []
    module = ModuleType("hpcrl.launch.local")

    def run_recipe(*args: Any) -> int:
        calls.append(args)
        if error := getattr(module, "error", None):
            raise error
        return 7

    module.run_recipe = run_recipe  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hpcrl.launch.local", module)
    return calls


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """What went to stderr, which must be one line."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


# ---- light


@pytest.mark.parametrize(
    ("argv", "spared"),
    [
        (["--help"], ("torch", "vllm", "megatron", "transformers", "numpy", "pydantic", "zmq", "aiohttp")),
        (["run", "--help"], ("torch", "vllm", "megatron", "transformers", "numpy", "zmq", "aiohttp")),
        (
            ["run", "RECIPE", "--dry-run", "--recompute-granularity", "full"],
            ("torch", "vllm", "megatron", "transformers", "zmq", "aiohttp"),
        ),
        (
            ["run", "RECIPE", "--dry-run", "--num-rolout", "3"],
            ("torch", "vllm", "megatron", "transformers", "zmq", "aiohttp"),
        ),
        (["submit", "RECIPE", "--dry-run"], ("torch", "vllm", "megatron", "transformers", "numpy", "aiohttp")),
        (["plan", "--help"], ("torch", "vllm", "megatron", "transformers")),
        (["completion", "bash"], ("torch", "vllm", "megatron", "transformers")),  # imports every command
        (["status"], ("torch", "numpy", "pydantic", "zmq", "aiohttp", "asyncio")),
    ],
    ids=["help", "run help", "dry run", "unknown flag", "submit", "plan help", "completion", "status"],
)
def test_nothing_heavy_is_imported(argv: list[str], spared: tuple[str, ...], recipe: Path, tmp_path: Path) -> None:
    code = (
        f"import sys; from hpcrl.cli.main import main; main(sys.argv[1:]); print('imported', [m for m in {spared!r} if m in "
        "sys.modules])"
    )
    words = [str(recipe) if word == "RECIPE" else word for word in argv]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}  # `hpcrl status` lists the runs that are recorded here
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, env=env)
    assert done.stdout.splitlines()[-1] == "imported []", done.stdout + done.stderr


def test_it_is_a_module_too() -> None:
    done = subprocess.run([sys.executable, "-m", "hpcrl", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"hpcrl {__version__}\n")


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m hpcrl options | true; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- help


@pytest.mark.parametrize("argv", [[], ["--help"], ["help"]])
def test_help_teaches_by_example(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "hpcrl run examples/quickstart.toml" in out and "hpcrl resume RUN" in out and "Exit status" in out


# ---- running


def test_run_passes_recipe_and_flags(recipe: Path, runner: list[tuple[Any, ...]]) -> None:
    """`hpcrl run` passes on the recipe and what the flags set."""
    argv = ["run", str(recipe), "--num-rollout", "5", "--no-bf16", "--optimizer", "sgd", "--vllm-max-num-seqs", "4"]
    assert main(argv) == 7
    [(given, overrides, resume)] = runner
    assert (given.name, given.path, [s.name for s in given.stages], resume) == ("small", recipe, ["sft", "grpo"], None)
    assert overrides == {"num_rollout": 5, "bf16": False, "megatron": {"optimizer": "sgd"}, "vllm": {"max_num_seqs": 4}}


def test_a_name_on_the_command_line_names_the_recipe(recipe: Path, runner: list[tuple[Any, ...]]) -> None:
    assert main(["run", str(recipe), "--name", "other"]) == 7
    assert runner[0][0].name == "other"


def test_resume_takes_the_directory_alone(runner: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--resume", "runs/x"]) == 7
    assert runner == [(None, {}, Path("runs/x"))]
    for more in (["--num-rollout", "3"], ["r.toml"], ["--dry-run"]):
        assert main(["run", "--resume", "runs/x", *more]) == 2
        assert f"{more[0]} has no effect with --resume" in said(capsys)


def test_dry_run_shows_every_stage_and_starts_nothing(
    recipe: Path, runner: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe.parent / "p.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    (recipe.parent / "config.json").write_text(json.dumps(MODELS["Qwen3-4B"][1]))
    there = ["--hf-checkpoint", str(recipe.parent), "--prompt-data", str(recipe.parent / "p.jsonl")]
    assert main(["run", str(recipe), "--dry-run", "--lr", "0.5", *there]) == 0
    out = capsys.readouterr().out
    first, second = out.split("# stage ")[1:]
    assert first.startswith("sft of small") and second.startswith("grpo of small")
    assert "engine" not in first and "engine   0      127.0.0.1  1" in second
    assert 'load = "{run}/sft/checkpoints"' in second and "vllm.max_num_seqs = 8" in second and "lr = 0.5" in second
    assert "seed" not in out and runner == []


@pytest.mark.parametrize(
    ("gpus", "said", "ranks"), [([], (), 1), ([], ("--actor-num-gpus-per-node", "4"), 4), (["/dev/nvidia0"], (), 8)]
)
def test_one_rank_without_a_gpu(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[str],
    said: tuple[str, ...],
    ranks: int,
) -> None:
    """Without a GPU one rank is enough unless more are asked for."""
    monkeypatch.setattr("hpcrl.run.gpu_environment.glob.glob", lambda pattern: gpus)
    file = tmp_path / "r.toml"
    file.write_text(
        'hf_checkpoint = "{prepared}/m"\nprompt_data = "{prepared}/p"\nlabel_key = "l"\nloss_type = '
        '"sft_loss"\nnum_rollout = 2\nrollout_num_gpus = 0\n'
    )
    assert main(["run", str(file), "--dry-run", *said]) == 0
    out, err = capsys.readouterr()
    assert f"trainer  {'0' if ranks == 1 else f'0-{ranks - 1}'} " in out, out
    assert ("no GPU here" in err) == (ranks == 1)


@pytest.mark.parametrize(("said", "chosen"), [((), True), (("--rollout-num-gpus", "2"), False)])
def test_one_engine_without_a_gpu(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    said: tuple[str, ...],
    chosen: bool,
) -> None:
    """Without a GPU, the evaluation of a model gets one engine."""
    monkeypatch.setattr("hpcrl.run.gpu_environment.glob.glob", lambda pattern: [])
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-4B"][1]))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    words = ["--eval-prompt-data", "held", str(tmp_path / "p.jsonl"), "--input-key", "prompt", "--label-key", "label"]
    assert main(["eval", str(tmp_path), *words, "--rm-type", "math", "--dry-run", *said]) == 0
    out, err = capsys.readouterr()
    assert ("one engine (--rollout-num-gpus for more)" in err) == chosen
    assert f"rollout_num_gpus = {1 if chosen else 2}" in out


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tensor-model-parallel-size 2", "stage sft: 1 trainer ranks"),
        ("--run-dir {x}", "--run-dir {x}: only {name} and {time}"),
        ("--lr -1", "--lr -1.0: expected a number >= 0"),
    ],
)
def test_refused_before_anything_is_made(
    words: str,
    message: str,
    more: list[str],
    recipe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What cannot run is refused before anything is made."""
    monkeypatch.chdir(recipe.parent)
    assert main(["run", str(recipe), *words.split(), *more]) == 2
    assert message in said(capsys) and [p.name for p in recipe.parent.iterdir()] == [recipe.name]


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["rum"], 2, "did you mean hpcrl"),
        (["xyzzy"], 2, "command; there are init"),
        (["run"], 2, "no recipe given"),
        (["train"], 2, "mean hpcrl run?"),
        (["compare"], 2, "mean hpcrl report?"),
        (["ls"], 2, "mean hpcrl status?"),
        (["trian"], 2, "mean hpcrl run?"),
        (["run", "a.toml", "b.toml"], 2, "more than one recipe: a.toml b.toml"),
        (["run", "a.toml", "--apply-chat-template", "false"], 2, "takes no value: --x"),
        (["run", "none.toml"], 2, "cannot read the recipe none.toml"),
        (["run", "examples/quickstart.tml"], 2, "did you mean examples/quickstart.toml?"),
        (
            ["run", "RECIPE", "--rm-type", "maths", "--dry-run"],
            2,
            "did you mean math?",
        ),
        (["run", "RECIPE", "--num-rolout", "3"], 2, "did you mean --num-rollout?"),
        (["run", "RECIPE", "--dry-rum"], 2, "did you mean --dry-run?"),
        (["run", "--resume"], 2, "--resume: expected text, got nothing"),
        (["options", "--wrte", "x"], 2, "unrecognized arguments: --wrte x; see hpcrl options --help"),
        (["options", "--write", "/nowhere/x"], 2, "cannot write /nowhere/x: No such file"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    argv: list[str],
    status: int,
    message: str,
    recipe: Path,
    runner: list[tuple[Any, ...]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([str(recipe) if word == "RECIPE" else word for word in argv]) == status
    line = said(capsys)
    assert line.startswith("hpcrl: error: ") and message in line and runner == []


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (
            DataError("p.jsonl:3: no key label", "give --label-key"),
            1,
            "hpcrl: error: p.jsonl:3: no key label; give --label-key",
        ),
        (Stopped("saved and stopped"), 143, "hpcrl: saved and stopped"),
        (KeyboardInterrupt(), 130, "hpcrl: interrupted"),
    ],
)
def test_errors_of_a_run_keep_their_exit_status(
    error: BaseException,
    status: int,
    line: str,
    recipe: Path,
    runner: list[tuple[Any, ...]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    sys.modules["hpcrl.launch.local"].error = error  # type: ignore[attr-defined]
    assert main(["run", str(recipe)]) == status
    assert said(capsys) == line


# ---- options


def test_what_passes_through_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options", "--megatron"]) == 0
    out = capsys.readouterr().out
    assert "--recompute-granularity" in out and "--no-rope-fusion" in out and "OptimizerConfig:" in out
    assert "--params-dtype " not in out and "--lr " not in out and "--finalize-model-grads-func" not in out
    assert main(["options", "--vllm"]) == 0
    out = capsys.readouterr().out
    assert (
        "--vllm-max-num-seqs INT" in out
        and "--vllm-enforce-eager, --vllm-no-enforce-eager" in out
        and "--vllm-api-key" not in out
    )


def test_another_python_is_one_line() -> None:
    """One without the environment's packages; -S hides them."""
    command = [sys.executable, "-S", "-m", "hpcrl", "run", "nosuch.toml"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "has no package msgspec" in done.stderr and done.stderr.count("\n") == 1
