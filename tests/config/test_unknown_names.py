"""Unknown names: other trainers' words lead to ours, slips to what was meant, and nothing to what is merely alike in
letters."""

from __future__ import annotations

import re

import pytest

from hpcrl.config import passthrough, setting_names
from hpcrl.config.flags import parse_flags
from hpcrl.config.setting_names import elsewhere, find_flag, gather, nearest, own
from hpcrl.errors import UsageError, UsageErrors


def told(*words: str) -> str:
    with pytest.raises(UsageError) as error:
        parse_flags(words)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning-rate", "write --lr"),
        ("batch-size", "write --rollout-batch-size (prompts of one rollout)"),
        ("model", "write --hf-checkpoint"),
        ("dataset", "write --prompt-data"),
        ("epochs", "write --num-epoch"),
        ("max-length", "write --rollout-max-context-len"),
        ("num_generations", "write --n-samples-per-prompt"),
        ("gpu-memory-utilization", "write --vllm-gpu-memory-utilization"),
        ("gradient-checkpointing", "write --recompute-granularity"),
        ("beta", "write --use-kl-loss with --kl-loss-coef"),
        ("use-kl-in-reward", "write --kl-coef"),
        ("custom-advantage-function-path", "write --advantage-estimator module.function"),
        ("get-mismatch-metrics", "trainer are always compared"),
        ("top-p", "write --rollout-top-p"),
        ("repetition-penalty", "trainer computes it without"),
        ("wandb", "metrics are in the"),
        ("wandb-key", "metrics are in the"),
        ("megatron-config-path", "roles differ by separate"),
        ("over-sampling-filter-input-size", "such way to fill"),
        ("sglang-enable-dp-attention", "the engines are vLLM's"),
        ("sglang-mem-fraction-static", "write --vllm-gpu-memory-utilization"),
        ("resume-from-checkpoint", "hpcrl resume RUN"),
        ("zzz-yyy", "see hpcrl run --help"),
        ("n-sample-per-prompt", "did you mean --n-samples-per-prompt?"),
        ("recompute-granularty", "did you mean --recompute-granularity?"),
        ("colocated", "did you mean --colocate?"),
        ("rollout-maxresponse-len", "did you mean --rollout-max-response-len?"),
    ],
)
def test_a_name_from_elsewhere_is_translated(name: str, hint: str) -> None:
    assert f"--{name} is an unknown option; " in told(f"--{name}", "1") and hint in told(f"--{name}", "1")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("learning-rate", "vllm-video-pruning-rate"),
        ("batch-size", "vllm-ubatch-size"),
        ("over-sampling-batch-size", "global-batch-size"),
        ("partial-rollout", "num-rollout"),
        ("wandb-key", "label-key"),
        ("sglang-enable-dp-attention", "vllm-enable-dbo"),
        ("custom-generate-function-path", "custom-rm-path"),
    ],
)
def test_what_is_merely_alike_in_letters_is_no_hint(name: str, wrong: str) -> None:
    known = [*own(), *passthrough.spellings("megatron"), *passthrough.spellings("vllm")]
    assert wrong not in (nearest(name, known) or "")


def test_a_hint_names_only_what_there_is() -> None:
    """And no word of others' hides a setting of Megatron's or vLLM's where these are not installed."""
    known = {*passthrough.spellings("megatron"), *passthrough.spellings("vllm"), *own()}
    assert known > {"lr", "recompute-granularity", "vllm-max-num-seqs"}
    for text in setting_names._HERE:
        for option in re.findall(r"{(.+?)}", text):
            assert find_flag(option)
    stale = known & {*setting_names._WORDS, *setting_names._REASONS}
    assert not stale, f"these are options now: drop {sorted(stale)} from setting_names.py"


def test_hint_for_a_later_option() -> None:
    """A hint about an option that does not exist yet holds until it does."""
    assert elsewhere("beta", ["lr", "kl-loss-coef"]) == ""
    assert elsewhere("beta", ["lr", "kl-loss-coef", "use-kl-loss"]) == "write use-kl-loss with kl-loss-coef"


def test_all_flag_errors_at_once() -> None:
    """All errors of a command line are reported at once."""
    words = "r.toml --learning-rate 1e-5 --num-rolout 3 --lr fast --vllm-api-key k --seed -1 --bf16=yes -n 3 --top-p 1"
    lines = told(*words.split()).splitlines()
    assert lines[0] == "7 things are wrong:" and len(lines) == 8
    for line, part in zip(
        lines[1:],
        ("--learning-rate", "--num-rolout", "--lr fast", "--vllm-api-key", "--bf16 takes no value", "-n is", "--top-p"),
        strict=True,
    ):
        assert line.startswith(f"  {part}")
    assert "\n" not in told("--num-rolout", "3")


def test_all_recipe_errors_at_once() -> None:
    """All errors of a recipe are reported at once."""
    values = {"learning_rate": 1, "lr": "a", "vllm": {"max_num_seq": 1, "api_key": "k"}, "megatron": 3, "seed": 1}
    with pytest.raises(UsageErrors) as error:
        gather(values, "r.toml")
    assert [str(part).split("; ")[0] for part in error.value.parts] == [
        "r.toml: learning_rate is an unknown option",
        'r.toml: lr = "a": expected a number >= 0',
        "r.toml: [vllm]: max_num_seq is an unknown option",
        "r.toml: [vllm]: api_key cannot be set: every route of an engine asks for the key of the run",
        "r.toml: megatron = 3: expected a table",
    ]
    assert "write lr" in str(error.value) and "did you mean max_num_seqs?" in str(error.value)


@pytest.mark.usefixtures("bare")
def test_other_trainers_names_without_packages() -> None:
    """Names of other trainers are recognised where the packages are not installed."""
    assert "write --lr" in told("--learning-rate", "1")
    assert "write --vllm-gpu-memory-utilization" in told("--gpu-memory-utilization", "0.5")
