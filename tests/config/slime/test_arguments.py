"""The guides' argument arrays, verbatim: nothing unknown, nothing ignored, the plan that they describe; slime's rules
hold at once."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.config.options import Options
from hpcrl.config.recipe import load_recipe, resolve_stages
from hpcrl.config.slime.arguments import split_flags, translate
from hpcrl.config.slime.verbatim import PLACES, name_of, recipe_and_refusals, recipe_of, split_arguments, split_program
from hpcrl.errors import UsageError, parts_of
from tests.config.slime.guides import GUIDES, QWEN3

BASE = "--actor-num-gpus-per-node 2 --rollout-num-gpus 6 --rollout-num-gpus-per-engine 2 " + QWEN3


def options_of(words: list[str]) -> Options:
    recipe, _ = recipe_and_refusals(words, {})
    return resolve_stages(recipe, {}, PLACES)[0]


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_is_honoured_word_for_word(guide: str) -> None:
    words, (ranks, engines, each) = GUIDES[guide]
    translation = translate(words)
    assert [line.flag for line in translation.lines if line.flag] == list(split_flags(words)), "one line for every flag"
    assert not translation.wrong
    options = options_of(words)
    assert (options.world_size, options.num_engines, options.rollout_num_gpus_per_engine) == (ranks, engines, each)
    assert options.rollout_temperature == 1 and options.n_samples_per_prompt == 8 and options.eps_clip_high == 0.28
    assert options.megatron["recompute_granularity"] == "full" and options.adam_beta2 == 0.98
    assert options.kl_loss_type == "low_var_kl" and options.use_kl_loss


@pytest.mark.parametrize("guide", GUIDES)
def test_its_recipe_gives_the_same_options(guide: str, tmp_path: Path) -> None:
    recipe, _ = recipe_and_refusals(GUIDES[guide][0], {})
    assert recipe.text
    file = tmp_path / "written.toml"
    file.write_text(recipe.text)
    loaded = load_recipe(file)
    assert resolve_stages(loaded, {}, PLACES) == resolve_stages(recipe, {}, PLACES)
    assert max(map(len, recipe.text.splitlines())) <= 400


def test_what_has_no_effect_passes_with_a_reason() -> None:
    words = f"{BASE} --sequence-parallel --opsm-delta 3 --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function --use-tis".split()
    translation = translate([*words, "--update-weight-mode", "full", "--use-tensorboard", "--wandb-key"])
    said = {line.flag: line.reading for line in translation.lines}
    assert said["opsm-delta"].outcome == "needless" and "--use-opsm is not given" in said["opsm-delta"].why
    assert (
        said["custom-tis-function-path"].outcome == "translated"
        and translation.values["custom_tis_function_path"] == "icepop"
    )
    assert said["update-weight-mode"].outcome in ("needless", "kept") and said["use-tensorboard"].outcome == "needless"
    assert "opsm_delta" not in translation.values and not translation.wrong


def test_defaults_that_differ_are_set_and_told() -> None:
    without = BASE.replace("--weight-decay 0.1", "").split()
    translation = translate(without)
    assert translation.values["weight_decay"] == 0.01
    assert any("slime's default" in line.reading.why for line in translation.lines if not line.flag)
    assert options_of(without).weight_decay == 0.01
    assert translation.values["request_timeout"] == 14400, "as long as slime's router waits"
    assert translate([*without, "--sglang-router-request-timeout-secs", "600"]).values["request_timeout"] == 600


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("--kl-coef 0.1 --kl-loss-coef 0.1", ["--kl-coef 0.1 and --kl-loss-coef 0.1"]),
        ("--use-tis --use-rollout-logprobs", ["--use-rollout-logprobs", "--use-tis"]),
        ("--rollout-temperature 0", ["--rollout-temperature 0.0: expected a number > 0"]),
        ("--rollout-num-gpus 5", ["--rollout-num-gpus 5", "--rollout-num-gpus-per-engine 2"]),
        ("--tensor-model-parallel-size 3", ["2 trainer ranks", "TP x PP x CP = 3"]),
        ("--advantage-estimator reinforce_plus_plus", ["--advantage-estimator reinforce_plus_plus", "--normalize-advantages"]),
        ("--global-batch-size 100", ["--global-batch-size 100", "256 samples"]),
        ("--sglang-ep-size 4", ["--sglang-ep-size 4", "--rollout-num-gpus-per-engine"]),
        ("--sglang-enable-torch-compile", ["--sglang-enable-torch-compile", "the engines run vLLM"]),
        ("--rollout-max-context-len 100 --rollout-max-prompt-len 100", ["--rollout-max-prompt-len 100", "--rollout-max-context-len 100"]),
        ("--rollout-batch-size many", ["--rollout-batch-size many", "whole number"]),
        ("--kl-loss-type k9", ["--kl-loss-type k9"]),
        ("--use-kl-loss yes", ["--use-kl-loss", "yes"]),
        ("--data-source-path slime.x.Y", ["--data-source-path slime.x.Y", "slime's that hpcrl does not have"]),
        ("--eval-top-p 0.7x", ["--eval-top-p 0.7x"]),
        ("--advantage-estimator on_policy_distillation", ["--advantage-estimator on_policy_distillation", "--use-opd now"]),
        ("--advantage-estimator grpo2", ["--advantage-estimator grpo2 is unknown", "known: cispo"]),
        ("--use-opd --opd-type sglang", ["--opd-type sglang: the teacher's server is vLLM's"]),
    ],
)  # fmt: skip
def test_slimes_rules_hold_at_submission(more: str, told: list[str]) -> None:
    words = f"{BASE} {more}".split()
    with pytest.raises(UsageError) as error:
        resolve_stages(recipe_of(words, {}), {}, PLACES)
    for part in told:
        assert part in str(error.value)


def test_all_that_does_not_fit_is_told_at_once() -> None:
    more = (
        "--qlora 8 --no-such-thing 1 --kl-coef 0.1 --kl-loss-coef 0.1 --rollout-num-gpus 5 --sglang-config x.yaml "
        "--multimodal-keys x"
    )
    with pytest.raises(UsageError) as error:
        recipe_of(f"{BASE} {more}".split(), {})
    text = str(error.value)
    assert len(parts_of(error.value)) >= 4
    for part in ("--qlora", "--no-such-thing", "--sglang-config", "--multimodal-keys", "--rollout-num-gpus 5"):
        assert part in text


def test_a_contradiction_is_no_flag_without_effect() -> None:
    words = BASE.replace("--use-kl-loss ", "").split()
    with pytest.raises(UsageError, match=r"--kl-coef 0.1 and --kl-loss-coef 0.2 both weigh the KL"):
        resolve_stages(recipe_of([*words, "--kl-coef", "0.1", "--kl-loss-coef", "0.2"], {}), {}, PLACES)


def test_refused_flag_is_not_also_missing() -> None:
    """A refused flag brings no error about its absence."""
    words = BASE.replace("--rm-type deepscaler", "--custom-rm-path").split()
    with pytest.raises(UsageError) as error:
        recipe_of(words, {})
    assert "no reward given" not in str(error.value) and "--custom-rm-path" in str(error.value)


def test_train_async_is_the_asynchronous_loop() -> None:
    words = [*BASE.split(), "--update-weights-interval", "2"]
    assert "loop" not in translate(words).values, "train.py is the synchronous one"
    translation = translate(words, "train_async.py")
    assert (translation.values["loop"], translation.values["update_weights_interval"]) == ("async", 2)
    assert "train_async.py -> --loop async" in [line.text() for line in translation.lines]
    words += ["--rollout-function-path", "fully_async_rollout.generate_rollout_fully_async"]
    translation = translate(words, "train_async.py")
    assert translation.values["loop"] == "fully-async" and not translation.wrong


def test_what_becomes_of_a_dead_engine_is_told() -> None:
    (line,) = translate(["--use-fault-tolerance"]).with_outcome("needless")
    assert "started again, up to --attempts" in line.reading.why
    (line,) = translate(["--use-fault-tolerance", "--colocate"]).with_outcome("needless")
    assert "hpcrl resume RUN continues" in line.reading.why
    assert translate(["--rollout-health-check-timeout", "20"]).values["rollout_health_check_timeout"] == 20


def test_sft_learns_chat_messages_as_slime_does() -> None:
    words = (
        "--hf-checkpoint /m --rollout-function-path slime.rollout.sft_rollout.generate_rollout --prompt-data /d.parquet"
    )
    words += " --input-key messages --num-rollout 3 --rollout-batch-size 8 --loss-type sft_loss --debug-train-only"
    assert options_of(words.split()).apply_chat_template
    assert not options_of(f"{words} --label-key label".split()).apply_chat_template


def test_words_are_split_as_argparse_does() -> None:
    assert split_flags(["--rollout-sample-hook-path", "a.b", "--rollout-sample-hook-path=c.d"]) == {
        "rollout-sample-hook-path": ["a.b", "c.d"]
    }
    assert split_arguments(["x"]) == (["x"], None)
    assert split_program(["python3", "/x/train_async.py", "--a"]) == ("train_async.py", ["--a"])
    assert split_program(["--a", "train.py"]) == ("train.py", ["--a", "train.py"])
    assert name_of(["--hf-checkpoint", "/x/GLM Z1-9B/"]) == "glm-z1-9b" and name_of(["--lr", "1"]) == "arguments"
    with pytest.raises(UsageError, match="not follow a flag"):
        recipe_of(["stray", "--lr", "1"], {})
    with pytest.raises(UsageError, match="nothing follows --"):
        recipe_of([], {})


def test_the_commands_take_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--num-rollout", "7", "--", *BASE.split()]) == 0
    assert "engine   2" in capsys.readouterr().out
    assert main(["run", "--dry-run", "--", *BASE.split()]) == 2
    shown = capsys.readouterr()
    assert "adam_beta2 = 0.98" in shown.out and "--hf-checkpoint /scratch/Qwen3-4B does not exist here" in shown.err
    assert main(["plan", "--", *GUIDES["GLM-4.5-355B, BF16 rollouts"][0]]) in (0, 2)
    assert "trainer  0-63" in capsys.readouterr().out, "the plan of what can be honoured is shown in any case"
    monkeypatch.setattr("hpcrl.cli.submit.can_submit", lambda: False)
    site = ["--layout", "homogeneous", "--set", "trainer.gpus_per_node=8", "scratch=/scratch"]
    assert main(["submit", "--dry-run", *site, "--", *BASE.split()]) == 0
    assert "#SBATCH --job-name=qwen3-4b-hpcrl" in capsys.readouterr().out
    for command in ("plan", "run", "submit", "launch"):
        assert main([command, "x.toml", "--", *BASE.split()]) == 2
    assert main(["submit", "--print", "--", *BASE.split()]) == 2
    assert "hpcrl import --" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_wrong_submission_is_refused_within_a_second() -> None:
    began = time.process_time()
    children = sum(map(float, __import__("resource").getrusage(-1)[:2]))
    words = [sys.executable, "-m", "hpcrl", "submit", "--", *BASE.split(), "--kl-coef", "0.1", "--kl-loss-coef", "0.2"]
    said = subprocess.run(words, capture_output=True, text=True, check=False, timeout=240)
    used = sum(map(float, __import__("resource").getrusage(-1)[:2])) - children + time.process_time() - began
    assert said.returncode == 2 and "--kl-loss-coef 0.2" in said.stderr
    assert used < 2.0, f"{used:.2f} CPU seconds"  # of which a processor of its own needs less than one
