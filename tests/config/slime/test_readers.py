"""What each reader of a flag's value writes instead, word by word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.config.slime import readers
from hpcrl.config.slime.arguments import translate
from hpcrl.config.slime.verbatim import summary


def reading(name: str, flag: str, **given: str) -> tuple[str, tuple[str, ...]]:
    words = {key.replace("_", "-"): tuple(value.split()) for key, value in given.items()}
    found = readers.READERS[name](flag, words)
    return found.outcome, found.words


@pytest.mark.parametrize(("share", "said"), [("0.9", True), ("1", False), ("1.0", False)])
def test_top_p_changes_the_gradient(share: str, said: bool) -> None:
    """slime trains on the distribution of the tokens that top-p leaves: a script with it imports with a line."""
    found = translate(["--rollout-top-p", share])
    assert found.values["rollout_top_p"] == float(share)
    lines = [line for line in summary(found) if "--rollout-top-p" in line]
    assert [("the gradient is another" in line) for line in lines] == [True] * said


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
        ("auto", "deepep_low_latency"),
        ("", "deepep_low_latency"),
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


DELTA = {"update_weight_mode": "delta"}
TAUGHT = {"use_opd": "", "rm_type": "math"}
SFT = {"rollout_function_path": "slime.rollout.sft_rollout.generate_rollout"}
EAGLE = {"sglang_speculative_algorithm": "EAGLE"}


@pytest.mark.parametrize(
    ("name", "flag", "given", "outcome", "words"),
    [
        ("update_mode", "update-weight-mode", {"update_weight_mode": "full"}, "needless", ""),
        ("update_mode", "update-weight-mode", DELTA, "needless", ""),
        ("update_mode", "update-weight-mode", {"update_weight_mode": "odd"}, "refused", ""),
        ("update_transport", "update-weight-transport", {"update_weight_transport": "nccl"}, "needless", ""),
        ("update_transport", "update-weight-transport", {"update_weight_transport": "disk"}, "translated", "--weight-transfer disk"),
        ("update_transport", "update-weight-transport", DELTA | {"update_weight_transport": "disk"}, "needless", ""),
        ("update_transport", "update-weight-transport", DELTA | {"update_weight_transport": "odd"}, "translated", "--weight-transfer odd"),
        ("update_directory", "update-weight-disk-dir", DELTA | {"update_weight_disk_dir": "/d"}, "needless", ""),
        ("update_directory", "update-weight-disk-dir", {"update_weight_disk_dir": "/d"}, "kept", "--update-weight-disk-dir /d"),
        ("data_parallel", "sglang-dp-size", {"sglang_dp_size": "1"}, "needless", ""),
        ("data_parallel", "sglang-dp-size", {"sglang_dp_size": "4"}, "translated", "--vllm-data-parallel-size 4"),
        ("all_to_all", "sglang-moe-a2a-backend", {"sglang_moe_a2a_backend": "none"}, "needless", ""),
        ("all_to_all", "sglang-moe-a2a-backend", {"sglang_moe_a2a_backend": "mooncake"}, "refused", ""),
        ("deepep_mode", "sglang-deepep-mode", {"sglang_moe_a2a_backend": "deepep"}, "needless", ""),
        ("deepep_mode", "sglang-deepep-mode", {"sglang_moe_a2a_backend": "none"}, "refused", ""),
        ("offload", "offload", {}, "translated", "--offload-train --offload-rollout"),
        ("asynchronous", "train_async.py", {}, "translated", "--loop async"),
        ("deterministic", "sglang-enable-deterministic-inference", {"deterministic_mode": ""}, "needless", ""),
        ("deterministic", "sglang-enable-deterministic-inference", {}, "refused", ""),
        ("train_only", "debug-train-only", {"loss_type": "sft_loss"}, "needless", ""),
        ("train_only", "debug-train-only", {"debug_train_only": ""}, "kept", "--debug-train-only"),
        ("teacher", "opd-type", {"opd_type": "sglang"}, "refused", ""),
        ("teacher", "opd-type", {"opd_type": "megatron"}, "kept", "--opd-type megatron"),
        ("spec", "spec", {"spec": "none qwen9-1B"}, "refused", ""),
        ("spec", "spec", {"spec": "slime_plugins.models.glm4 get_glm_spec"}, "kept", "--spec slime_plugins.models.glm4 get_glm_spec"),
        ("spec", "spec", {"spec": "vime_plugins.models.glm4 get_glm_spec"}, "kept", "--spec vime_plugins.models.glm4 get_glm_spec"),
        ("spec", "spec", {"spec": "vime_plugins.models.glm4 other"}, "refused", ""),
        ("spec", "spec", {"spec": "mine.spec build"}, "kept", "--spec mine.spec build"),
        ("reward", "rm-type", TAUGHT | {"advantage_estimator": "grpo"}, "needless", ""),
        ("reward", "rm-type", TAUGHT, "translated", "--advantage-estimator none"),
        ("reward", "rm-type", TAUGHT | {"label_key": "a"}, "kept", "--rm-type math"),
        ("reward", "rm-type", TAUGHT | {"eval_interval": "5"}, "kept", "--rm-type math"),
        ("reward", "rm-type", TAUGHT | {"custom_rm_path": "x.y"}, "kept", "--rm-type math"),
        ("reward", "rm-type", TAUGHT | {"advantage_estimator": "gspo"}, "kept", "--rm-type math"),
        ("reward", "rm-type", TAUGHT | {"rm_type": "random"}, "kept", "--rm-type random"),
        ("reward", "rm-type", TAUGHT | {"rm_type": "math f1"}, "kept", "--rm-type math f1"),
        ("reward", "rm-type", TAUGHT | {"rm_type": "nowhere"}, "kept", "--rm-type nowhere"),
        ("reward", "rm-type", {"rm_type": "math"}, "kept", "--rm-type math"),
        ("estimator", "advantage-estimator", TAUGHT | {"advantage_estimator": "grpo"}, "translated", "--advantage-estimator none"),
        ("estimator", "advantage-estimator", {"advantage_estimator": "grpo"}, "kept", "--advantage-estimator grpo"),
        ("rollout_function", "rollout-function-path", SFT | {"loss_type": "sft_loss"}, "translated", "--apply-chat-template"),
        ("rollout_function", "rollout-function-path", SFT | {"loss_type": "sft_loss", "label_key": "a"}, "needless", ""),
        ("rollout_function", "rollout-function-path", SFT | {"label_key": "a"}, "refused", ""),
        ("rollout_function", "rollout-function-path", {"rollout_function_path": "mine.sft_rollout.generate_rollout"}, "kept", "--rollout-function-path mine.sft_rollout.generate_rollout"),
        ("rollout_function", "rollout-function-path", {"rollout_function_path": "fully_async_rollout.generate_rollout_fully_async"}, "translated", "--loop fully-async"),
        ("speculation", "sglang-speculative-algorithm", EAGLE | {"sglang_speculative_num_steps": "x"}, "refused", ""),
        ("speculation", "sglang-speculative-algorithm", {"sglang_speculative_algorithm": "EAGLE3", "sglang_speculative_num_steps": "2"}, "refused", ""),
        ("speculation", "sglang-speculative-algorithm", EAGLE | {"sglang_speculative_num_steps": "2", "sglang_speculative_draft_model_path": "/d"}, "refused", ""),
        ("part_of_speculation", "sglang-speculative-eagle-topk", EAGLE | {"sglang_speculative_eagle_topk": "1"}, "needless", ""),
        ("part_of_speculation", "sglang-speculative-eagle-topk", EAGLE | {"sglang_speculative_eagle_topk": "2"}, "refused", ""),
        ("part_of_speculation", "sglang-speculative-eagle-topk", {"sglang_speculative_eagle_topk": "2"}, "needless", ""),
        ("part_of_speculation", "sglang-speculative-num-steps", EAGLE | {"sglang_speculative_num_steps": "2"}, "needless", ""),
        ("part_of_speculation", "sglang-speculative-draft-attention-backend", EAGLE | {"sglang_speculative_draft_attention_backend": "fa3"}, "needless", ""),
        ("part_of_speculation", "sglang-speculative-draft-attention-backend", EAGLE | {"sglang_speculative_draft_attention_backend": "odd"}, "refused", ""),
        ("mismatch_metrics", "get-mismatch-metrics", {}, "needless", ""),
        ("mismatch_metrics", "get-mismatch-metrics", {"custom_tis_function_path": "x.y"}, "translated", "--use-tis"),
        ("mismatch_metrics", "get-mismatch-metrics", {"custom_tis_function_path": "x.y", "use_tis": ""}, "needless", ""),
        ("mismatch_metrics", "get-mismatch-metrics", {"custom_tis_function_path": "mis", "custom_config_path": "c"}, "needless", ""),
        ("mismatch_metrics", "get-mismatch-metrics", {"custom_tis_function_path": "mis"}, "translated", "--use-tis"),
        ("mismatch_metrics", "get-mismatch-metrics", {"custom_tis_function_path": "x.y", "custom_config_path": "c"}, "translated", "--use-tis"),
        ("dumps", "save-debug-rollout-data", {"save_debug_rollout_data": "/a/x.pt"}, "translated", "--save-debug-rollout-data /a/x_{rollout_id}.pt"),
        ("dumps", "save-debug-rollout-data", {"save_debug_rollout_data": "/a/x_{rollout_id:05d}.pt"}, "kept", "--save-debug-rollout-data /a/x_{rollout_id:05d}.pt"),
        ("dumps", "save-debug-rollout-data", {"save_debug_rollout_data": "/a/x_{rollout_id!s}.pt"}, "kept", "--save-debug-rollout-data /a/x_{rollout_id!s}.pt"),
        ("dumps", "save-debug-rollout-data", {"save_debug_rollout_data": "/a/x_{step}.pt"}, "kept", "--save-debug-rollout-data /a/x_{step}.pt"),
        ("agreement", "ci-max", {"ci_max": "0.1"}, "needless", ""),
        ("agreement", "ci-max", {"ci_max": "0.1", "ci_test": ""}, "translated", "--max-logprob-diff 0.1"),
        ("engine_tensor_parallel", "vllm-tensor-parallel-size", {"vllm_tensor_parallel_size": "4", "rollout_num_gpus_per_engine": "8", "vllm_data_parallel_size": "2"}, "needless", ""),
        ("engine_tensor_parallel", "vllm-tensor-parallel-size", {"vllm_tensor_parallel_size": "2", "rollout_num_gpus_per_engine": "8", "vllm_data_parallel_size": "2", "vllm_pipeline_parallel_size": "2"}, "needless", ""),
        ("engine_tensor_parallel", "vllm-tensor-parallel-size", {"vllm_tensor_parallel_size": "4", "rollout_num_gpus_per_engine": "8"}, "refused", ""),
        ("engine_tensor_parallel", "vllm-tensor-parallel-size", {"vllm_tensor_parallel_size": "1"}, "needless", ""),
    ],
)  # fmt: skip
def test_what_is_written_instead(name: str, flag: str, given: dict[str, str], outcome: str, words: str) -> None:
    """Of every branch of a reader."""
    assert reading(name, flag, **given) == (outcome, tuple(words.split()))


@pytest.mark.parametrize("warm", ["lr-warmup-iters", "lr-warmup-fraction"])
def test_a_decay_by_the_root_needs_a_warm_up(warm: str) -> None:
    """Either kind will do, one of 0 is none, and other styles need none."""
    flag = {"lr_decay_style": "inverse-square-root"}
    assert reading("decay_style", "lr-decay-style", **flag)[0] == "refused"
    assert reading("decay_style", "lr-decay-style", **flag | {warm.replace("-", "_"): "0"})[0] == "refused"
    kept = ("kept", ("--lr-decay-style", "inverse-square-root"))
    assert reading("decay_style", "lr-decay-style", **flag | {warm.replace("-", "_"): "0.1"}) == kept
    assert reading("decay_style", "lr-decay-style", lr_decay_style="cosine") == ("kept", ("--lr-decay-style", "cosine"))


ROLES = """megatron:
  - {role: critic, overrides: {lr: 1.0e-5, lr_warmup_iters: 3, load: /c}}
  - {role: actor, overrides: {lr: 1.0e-6, weight_decay: 0.1}}
"""


@pytest.mark.parametrize(
    ("text", "given", "outcome", "words"),
    [
        (ROLES, {"advantage_estimator": "ppo"}, "translated", "--critic-lr 1e-05 --critic-lr-warmup-iters 3 --critic-load /c --lr 1e-06 --weight-decay 0.1"),
        (ROLES, {}, "translated", "--lr 1e-06 --weight-decay 0.1"),
        ("megatron: []\n", {}, "needless", ""),
        ("megatron: [{role: actor}]\n", {}, "needless", ""),
        ("megatron: [{role: critic, overrides: {num_layers: 4}}]\n", {"num_layers": "4", "advantage_estimator": "ppo"}, "needless", ""),
        ("megatron: [{role: critic, overrides: {num_layers: 4.0}}]\n", {"num_layers": "4", "advantage_estimator": "ppo"}, "needless", ""),
        ("megatron: [{role: critic, overrides: {num_layers: 5}}]\n", {"num_layers": "4", "advantage_estimator": "ppo"}, "refused", ""),
        ("megatron: [{role: critic, overrides: {num_layers: 5}}]\n", {}, "refused", ""),
        ("megatron: [{role: actor, overrides: {lr: [1]}}]\n", {}, "refused", ""),
        ("megatron: [{role: judge, overrides: {lr: 1}}]\n", {}, "refused", ""),
        ("megatron: [{role: actor, overrides: [1]}]\n", {}, "refused", ""),
        ("megatron: [1]\n", {}, "refused", ""),
        ("megatron: {a: 1}\n", {}, "refused", ""),
        ("- 1\n", {}, "refused", ""),
    ],
)  # fmt: skip
def test_settings_of_roles(text: str, given: dict[str, str], outcome: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "roles.yaml").write_text(text)
    found = reading("role_settings", "megatron-config-path", megatron_config_path=f"{tmp_path}/roles.yaml", **given)
    assert found == (outcome, tuple(words.split()))
