"""What each reader of a flag's value writes instead, word by word."""

from __future__ import annotations

import json

import pytest

from hpcrl.slime import readers


def reading(name: str, flag: str, **given: str) -> tuple[str, tuple[str, ...]]:
    words = {key.replace("_", "-"): tuple(value.split()) for key, value in given.items()}
    found = getattr(readers, name)(flag, words)
    return found.outcome, found.words


def test_a_held_out_set_without_a_name() -> None:
    """slime reads a single path as the set aime; names with paths are the same here."""
    flag = "eval-prompt-data"
    assert reading("eval_prompt_data", flag, eval_prompt_data="p.jsonl") == (
        "translated",
        ("--eval-prompt-data", "aime", "p.jsonl"),
    )
    named = "a a.jsonl b b.jsonl"
    assert reading("eval_prompt_data", flag, eval_prompt_data=named) == ("kept", (f"--{flag}", *named.split()))


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", ""])
def test_a_kl_that_slime_ignores(estimator: str) -> None:
    """It computes it for every estimator and forgets it for these; without the flag the estimator is grpo."""
    given = {"advantage_estimator": estimator} if estimator else {}
    assert reading("kl_in_reward", "kl-coef", kl_coef="0.01", **given) == ("needless", ())
    assert reading("kl_in_reward", "kl-coef", kl_coef="0.0", **given) == ("kept", ("--kl-coef", "0.0"))
    both = reading("kl_in_reward", "kl-coef", kl_coef="0.01", kl_loss_coef="0.1", **given)
    assert both == ("kept", ("--kl-coef", "0.01"))


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_kl_that_slime_takes_off(estimator: str) -> None:
    found = reading("kl_in_reward", "kl-coef", kl_coef="0.01", advantage_estimator=estimator)
    assert found == ("kept", ("--kl-coef", "0.01"))


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        ("low_latency", "deepep_low_latency"),
        ("normal", "deepep_high_throughput"),
        ("auto", "deepep_high_throughput"),
        ("", "deepep_high_throughput"),
    ],
)
def test_all_to_all_of_the_experts(mode: str, backend: str) -> None:
    given = {"sglang_deepep_mode": mode} if mode else {}
    found = reading("all_to_all", "sglang-moe-a2a-backend", sglang_moe_a2a_backend="deepep", **given)
    assert found == ("translated", ("--vllm-all2all-backend", backend))


@pytest.mark.parametrize(
    ("size", "engine", "outcome", "words"),
    [
        ("1", "8", "needless", ()),
        ("8", "8", "translated", ("--vllm-enable-expert-parallel",)),
        ("4", "8", "refused", ()),
        ("16", "8", "refused", ()),
        ("2", "", "refused", ()),
    ],
)
def test_experts_over_an_engines_gpus(size: str, engine: str, outcome: str, words: tuple[str, ...]) -> None:
    given = {"rollout_num_gpus_per_engine": engine} if engine else {}
    assert reading("expert_parallel", "sglang-ep-size", sglang_ep_size=size, **given) == (outcome, words)


@pytest.mark.parametrize("steps", ["1", "3"])
def test_drafts_of_the_models_own_layers(steps: str) -> None:
    """As many tokens are drafted as sglang has steps."""
    given = {"sglang_speculative_algorithm": "EAGLE", "sglang_speculative_num_steps": steps}
    outcome, (flag, text) = reading("speculation", "sglang-speculative-algorithm", **given)
    assert (outcome, flag) == ("translated", "--vllm-speculative-config")
    assert json.loads(text) == {"method": "mtp", "num_speculative_tokens": int(steps)}


@pytest.mark.parametrize(
    ("name", "backend"), [("fa3", "FLASH_ATTN"), ("flashinfer", "FLASHINFER"), ("triton", "TRITON_ATTN"), ("odd", "")]
)
def test_attention_of_the_engines(name: str, backend: str) -> None:
    found = reading("attention_backend", "sglang-attention-backend", sglang_attention_backend=name)
    assert found == (("translated", ("--vllm-attention-backend", backend)) if backend else ("refused", ()))
