"""Every command that starts, submits or shows a run makes the same checks and says the same of what is wrong."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe
from hpcrl.errors import DataError, UsageError
from hpcrl.launch import preflight
from hpcrl.launch.preflight import NOTHING, HostView, absent, model_notes, refuse_missing_packages
from hpcrl.launch.site_file import load_site
from hpcrl.launch.slurm.submission import preview
from hpcrl.run.rundir import TRACKER
from hpcrl.sandbox.kinds import VARIABLE
from tests.support.published_models import MODELS

RECIPE = """
hf_checkpoint = "model"
prompt_data = "p.jsonl"
input_key = "input"
label_key = "label"
rm_type = "math"
num_rollout = 1
rollout_num_gpus = 1
actor_num_gpus_per_node = 1
n_samples_per_prompt = 2
"""
ROW = '{"input": "1 + 1 =", "label": "2"}\n'
#: flags -> what is said of them, by every command
SETTINGS = {
    "--tensor-model-parallel-size 3 --actor-num-gpus-per-node 3": "the 32 attention heads",
    "--num-layers 41": "--num-layers 41: the model's config.json says 36",
    "--prompt-data bad.jsonl": "bad.jsonl, line 2: no key 'label'",
}
#: the same of what is not here: an error where this machine runs it, a note where others may
ABSENT = {
    "--hf-checkpoint modle": "--hf-checkpoint modle does not exist here",
    "--prompt-data q.jsonl": "the prompt file q.jsonl does not exist here",
    "--load chekpoints": "--load chekpoints does not exist here",
    "--load empty": f"--load empty holds no {TRACKER} and no config.json",
    "--ref-load chekpoints --use-kl-loss": "--ref-load chekpoints does not exist here",
    "--rollout-sample-filter-path own.absent": "--rollout-sample-filter-path own.absent: own has no absent",
}
STRICT = ["run", "run --dry-run", "submit --dry-run", "doctor"]
LENIENT = ["plan", "launch --hostfile hosts --dry-run"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpcrl.cli.submit.can_submit", lambda: False)
    (tmp_path / "model").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODELS["Qwen3-4B"][1]))
    (tmp_path / "r.toml").write_text(RECIPE)
    (tmp_path / "p.jsonl").write_text(ROW)
    (tmp_path / "bad.jsonl").write_text(ROW + '{"input": "1"}\n')
    (tmp_path / "own.py").write_text("def reward(options, sample): return 1.0\n")
    (tmp_path / "hosts").write_text("localhost slots=8\n")
    return tmp_path


def said_by(command: str, flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """(exit status, stdout and stderr in one) of `hpcrl COMMAND r.toml FLAGS`."""
    name, *words = command.split()
    status = main([name, "r.toml", *words, *flags.split()])
    told = capsys.readouterr()
    return status, told.out + told.err


@pytest.mark.parametrize("command", [*STRICT, *LENIENT])
def test_what_cannot_run_is_refused_alike(command: str, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    for flags, words in SETTINGS.items():
        status, said = said_by(command, flags, capsys)
        assert status and words in said, (command, flags, said)
    assert not (folder / "runs").exists(), "nothing was made"


@pytest.mark.parametrize("command", [*STRICT, *LENIENT])
def test_what_is_not_here_is_told_alike(command: str, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    for flags, words in ABSENT.items():
        status, said = said_by(command, flags, capsys)
        assert words in said, (command, flags, said)
        assert bool(status) == (command in STRICT), (command, flags, said)
    assert not (folder / "runs").exists(), "nothing was made"


def test_all_that_is_wrong_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = said_by("run", "--num-layers 41 --load chekpoints --rollout-sample-filter-path own.absent", capsys)
    assert all(words in said for words in ("--num-layers 41", "--load chekpoints", "own.absent"))


def test_load_may_be_empty() -> None:
    """As in the scripts of slime, where --load and --save are one directory and --ref-load has the weights to begin
    with."""
    first = Options(load="new", save="./new", hf_checkpoint="model")
    other = Options(load="new", ref_load="model", hf_checkpoint="model")
    assert not absent([first, other], HostView())
    assert [error.what for error in absent([Options(load="new", hf_checkpoint="model")], HostView())] == [
        "--load new does not exist here"
    ]
    assert not absent([Options(load="new", hf_checkpoint="none", custom_rm_path="own.absent")], NOTHING)


def test_held_out_sets_are_looked_for() -> None:
    evaluates = Options(hf_checkpoint="model", eval_config="sets.yaml", eval_interval=2)
    assert [error.what for error in absent([evaluates], HostView())] == ["--eval-config sets.yaml does not exist here"]


def test_an_adapter_to_begin_with_is_looked_at(folder: Path) -> None:
    begun = Options(hf_checkpoint="model", lora_rank=4, lora_adapter_path="empty")
    assert "empty holds no adapter_config.json" in absent([begun], HostView())[0].what
    (folder / "empty" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}')
    assert not absent([begun], HostView())
    with pytest.raises(DataError, match="give --lora-rank 8$"):
        preflight.check_adapters([begun])


def test_functions_are_looked_for() -> None:
    named = Options(hf_checkpoint="model", custom_rm_path="own.absent")
    assert [error.what for error in absent([named], HostView())] == ["--custom-rm-path own.absent: own has no absent"]


def test_a_checkpoint_is_known_by_its_files(folder: Path) -> None:
    for name in (TRACKER, ".metadata", "config.json"):
        shutil.rmtree(folder / "empty")
        (folder / "empty").mkdir()
        (folder / "empty" / name).touch()
        assert not absent([Options(load="empty", hf_checkpoint="model")], HostView()), name
    (folder / "run" / "last").mkdir(parents=True)
    (folder / "run" / "last" / "options.json").write_text("{}")
    run = Options(load="run", hf_checkpoint="model")
    assert [error.what for error in absent([run], HostView())] == [f"--load run holds no {TRACKER} and no config.json"]
    (folder / "run" / "last" / "checkpoints").mkdir()
    (folder / "run" / "last" / "checkpoints" / TRACKER).touch()
    assert not absent([run], HostView()), "a run with a checkpoint"


def test_missing_packages_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that are not installed are reported before the run."""
    real = preflight.importlib.util.find_spec
    monkeypatch.setattr(
        preflight.importlib.util, "find_spec", lambda name: None if name in ("torch", "vllm") else real(name)
    )
    with pytest.raises(UsageError) as caught:
        refuse_missing_packages([Options(hf_checkpoint="model", rollout_num_gpus=1)])
    assert (
        "torch, vllm" in caught.value.what and sys.executable in caught.value.what and "hpcrl[gpu]" in caught.value.hint
    )


@pytest.mark.parametrize("command", ["run", "run --dry-run"])
def test_a_kind_of_sandbox_is_tried_first(
    command: str, capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a later stage would find is said before the first one; one that cannot be had needs no function's help."""
    monkeypatch.setenv("PATH", str(folder))  # no bwrap
    agent = "--custom-generate-function-path hpcrl.rollout.samplers.harbor_agent.generate"
    status, said = said_by(command, f"{agent} --sandbox-kind bwrap", capsys)
    assert status == 2 and "--sandbox-kind bwrap: no sandbox" in said, said
    status, said = said_by(command, f"{agent} --sandbox-on nodes --sandbox-kind bwrap", capsys)
    assert status == 2 and "--sandbox-kind bwrap: no sandbox" in said, "all nodes are this machine"
    monkeypatch.setenv(VARIABLE, "docker")
    status, said = said_by(command, agent, capsys)
    assert status == 2 and f"{VARIABLE}=docker" in said, said
    monkeypatch.setenv(VARIABLE, "bwrap")
    preflight.refuse_missing_boxes([Options(hf_checkpoint="model", rollout_num_gpus=1)])
    with pytest.raises(UsageError, match=f"^{VARIABLE}=bwrap: no sandbox"):
        preflight.refuse_missing_boxes([Options(hf_checkpoint="model", rollout_num_gpus=1, custom_rm_path="a.b")])
    assert not (folder / "runs").exists()


def test_what_a_login_node_lacks_is_asked_of_the_nodes() -> None:
    """Where they run an interpreter of their own; else its name is the advice, and it is true."""
    recipe = load_recipe(Path(__file__).parents[2] / "examples/qwen3-4b-8gpu.toml")
    given = {"megatron": {"attention_backend": "flash"}}
    nodes = {"trainer.gpus_per_node": 8, "engine.gpus_per_node": 8}
    with pytest.raises(UsageError, match="is not installed; .*--set python=PATH"):
        preview(recipe, given, load_site(None, nodes), packages=True)
    preview(recipe, given, load_site(None, nodes | {"python": "/opt/env/bin/python"}), packages=True)


def test_lengths_that_cannot_be_reached_are_told() -> None:
    """A response that may be as long as the context leaves no room for the prompt."""
    lengths = {"rollout_max_context_len": 32, "rollout_max_response_len": 600}
    (line,) = model_notes([Options(rollout_num_gpus=1, **lengths)] * 2)
    assert "--rollout-max-response-len 600" in line and "--rollout-max-context-len 32" in line
    assert not model_notes([Options(rollout_num_gpus=1, **lengths | {"rollout_max_response_len": 16})])
    assert not model_notes([Options(loss_type="sft_loss", **lengths)]), "nothing is sampled"
