"""What an algorithm lacks is refused before anything starts, and so is an option that the chosen one does not read."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from hpcrl.config.options import AlgorithmOptions, OffPolicyOptions, Options
from hpcrl.config.plugin_names import NEEDS, Kind, algorithm_files, find_algorithm_file
from hpcrl.config.rules.algorithm_needs import Needs, needs, policy_loss_name
from hpcrl.config.rules.option_rules import check_options, inert
from hpcrl.errors import UsageError
from tests.support.options import GRPO, SFT

PLUS = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}
KL = {"use_kl_loss": True, "ref_load": "r"}
MIS = {"use_tis": True, "custom_tis_function_path": "mis"}
TEACHER = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "t"}
SERVER = {"use_opd": True, "opd_type": "vllm", "opd_teacher_url": "http://node7:8000"}
DPO = {"loss_type": "dpo_loss", "ref_load": "r", "n_samples_per_prompt": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"n_samples_per_prompt": 1},
            "grpo needs several responses.*--n-samples-per-prompt is 1: every advantage would be 0; give.*8 or",
        ),
        ({"n_samples_per_prompt": 1, "advantage_estimator": "rloo"}, "rloo needs several responses"),
        (
            {"advantage_estimator": "ppo", "num_critic_only_steps": 3, "num_rollout": 3},
            "--num-critic-only-steps 3 leaves none of --num-rollout 3 to the policy",
        ),
        (
            {"advantage_estimator": "ppo", "critic_lr_warmup_iters": 3, "num_rollout": 3},
            "--critic-lr-warmup-iters 3 is not less than.*3 optimizer steps",
        ),
        ({"advantage_estimator": "reinforce_plus_plus"}, "reinforce_plus_plus needs --normalize-advantages; give it"),
        (
            {"advantage_estimator": "reinforce_plus_plus_baseline"},
            "reinforce_plus_plus_baseline needs --normalize-advantages",
        ),
        ({"use_kl_loss": True}, "--use-kl-loss needs a reference model;.*--ref-load"),
        ({"kl_coef": 0.1}, "--kl-coef 0.1 needs a reference model;.*--ref-load"),
        (KL | {"kl_coef": 0.1, "kl_loss_coef": 0.2}, "--kl-coef 0.1 and --kl-loss-coef 0.2 both weigh the KL"),
        (
            {"loss_type": "dpo_loss", "n_samples_per_prompt": 2},
            "--loss-type dpo_loss needs a reference model;.*--ref-load",
        ),
        (DPO | {"n_samples_per_prompt": 4}, "compares two responses, --n-samples-per-prompt is 4"),
        (
            DPO | {"global_batch_size": 2, "actor_num_gpus_per_node": 2},
            "2.*optimizer step are not",
        ),
        ({"loss_type": "custom_loss"}, "give --custom-loss-function-path"),
        ({"use_rollout_logprobs": True, "use_tis": True}, "--use-rollout-logprobs and --use-tis exclude each other"),
        ({"use_rollout_logprobs": True, "keep_old_actor": True}, "--use-rollout-logprobs and --keep-old-actor"),
        (
            {"use_rollout_logprobs": True, "use_routing_replay": True},
            "with --use-rollout-logprobs there is no such.*--use-rollout-routing-replay instead",
        ),
        ({"advantage_estimator": "gppo"}, "--advantage-estimator.*known: cispo, grpo, gspo, "),
        (
            {"pg_loss_type": "clip"},
            "--pg-loss-type.*cispo, gmpo, gspo, ppo,",
        ),
        (KL | {"kl_loss_type": "k4"}, "--kl-loss-type k4 is unknown; known: k1, k2, k3, low_var_kl"),
        (KL | {"kl_loss_type": "unbiased"}, "--kl-loss-type unbiased is .*--kl-loss-type k3 with --use-unbiased-kl"),
        (
            {"use_tis": True, "custom_tis_function_path": "tos"},
            "--custom-tis-function-path tos is unknown; known:",
        ),
        ({"use_tis": True, "tis_clip": 1.0, "tis_clip_low": 1.5}, "--tis-clip-low 1.5 is higher than --tis-clip 1"),
        (MIS | {"use_rs": True, "rs_lower_bound": 3.0}, "--rs-lower-bound 3.*than the upper bound 2"),
        (MIS | {"use_rs": True, "rs_upper_bound": 0.4}, "--rs-lower-bound 0.5.*than the upper bound 0.4"),
        (MIS | {"tis_mode": "mask"}, "--tis-mode mask has no lower.*slime's default is 1 / --tis-clip, 0.5"),
        (MIS | {"tis_batch_normalize": True, "tis_level": "geometric"}, "--tis-batch-normalize .* geometric; leave it"),
        (MIS | {"tis_mode": "clip", "tis_clip": 4.0}, "--tis-mode clip has no lower.*, 0.25"),
        (
            {"pg_loss_divisor": 9, "calculate_per_token_loss": True},
            "--pg-loss-divisor and --calculate-per-token-loss exclude",
        ),
        ({"advantage_estimator": "none"}, "every advantage would be 0; give --use-opd"),
        ({"use_opd": True}, "--use-opd does not say where.*--opd-type vllm with"),
        (
            TEACHER | {"opd_teacher_load": None},
            "--opd-type megatron needs the teacher's.*--opd-teacher-load",
        ),
        (SERVER | {"opd_teacher_url": None}, "--opd-type vllm needs .*; give --opd-teacher-url"),
        (
            SERVER | {"opd_teacher_url": "node7:8000"},
            "--opd-teacher-url node7:8000 is not an address;",
        ),
        (
            SERVER | {"opd_kl_type": "forward"},
            "--opd-kl-type forward needs the teacher's",
        ),
        (SERVER | {"rollout_temperature": 0.8}, "gives log-probs at temperature 1, the student samples at .* 0.8"),
        ({"enable_mtp_training": True}, "--enable-mtp-training needs layers to train"),
        (
            {"mtp_num_layers": 1, "enable_mtp_training": True, "megatron": {"optimizer_cpu_offload": True}},
            "--enable-mtp-training and --optimizer-cpu-offload exclude",
        ),
        (
            {"mtp_num_layers": 1, "megatron": {"pipeline_model_parallel_layout": "Et|L"}},
            "--mtp-num-layers and --pipeline-model-parallel-layout exclude",
        ),
        ({"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}, "--enable-mtp-training is not given"),
        ({"overlong_buffer_len": 2000}, "--overlong-buffer-len 2000 is more than --rollout-max-response-len 1024"),
    ],
    ids=str,
)
def test_what_an_algorithm_lacks_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_options(Options(**(GRPO | change)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kl_loss_type": "k3"}, "neither --use-kl-loss nor --kl-coef is given"),
        ({"kl_loss_coef": 0.1}, "--use-kl-loss is not given"),
        ({"use_unbiased_kl": True}, "--use-kl-loss is not given"),
        ({"ref_ckpt_step": 3}, "--ref-load is not given"),
        ({"ref_update_interval": 3, "ref_load": "r"}, "neither --use-kl-loss nor --kl-coef asks for a reference"),
        ({"gamma": 0.9}, "--advantage-estimator is grpo"),
        ({"lambd": 0.9, **PLUS}, "--advantage-estimator is reinforce_plus_plus"),
        ({"disable_rewards_normalization": True, "advantage_estimator": "rloo"}, "--advantage-estimator is rloo"),
        ({"value_clip": 0.1}, "--advantage-estimator grpo has no critic"),
        ({"critic_lr": 1e-5}, "--advantage-estimator grpo has no critic"),
        ({"eps_clip_c": 3.0, "pg_loss_type": "sapo"}, "policy loss is sapo"),
        ({"eps_clip_c": 3.0, "advantage_estimator": "cispo"}, "policy loss is cispo"),
        ({"sapo_tau_neg": 2.0}, "policy loss is ppo"),
        ({"tis_clip": 3.0}, "--use-tis is not given"),
        ({"custom_tis_function_path": "icepop"}, "--use-tis is not given"),
        ({"tis_level": "sequence", "use_tis": True}, "the correction is tis"),
        ({"tis_batch_normalize": True, "use_tis": True}, "the correction is tis"),
        ({"rs_level": "sequence", **MIS}, "--use-rs is not given"),
        ({"rs_veto_threshold": 1e-4, **MIS}, "--use-rs is not given"),
        ({"opsm_delta": 0.1}, "--use-opsm is not given"),
        ({"overlong_penalty_factor": 0.5}, "--overlong-buffer-len is not given"),
        ({"dpo_beta": 0.3}, "--loss-type is policy_loss"),
        ({"entropy_coef": 0.1, **DPO}, "--loss-type is dpo_loss"),
        ({"custom_loss_function_path": "a.b"}, "--loss-type is policy_loss"),
        ({"opd_kl_coef": 0.5}, "--use-opd is not given"),
        ({"opd_teacher_url": "http://node7", **TEACHER}, "--opd-type is megatron"),
        ({"opd_teacher_ckpt_step": 5, **SERVER}, "--opd-type is vllm"),
        ({"use_opd": True, **DPO}, "--loss-type is dpo_loss"),
    ],
    ids=str,
)
def test_what_is_not_read_is_an_error(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(change)).replace('_', '-')} has no effect here: .*{why}"):
        check_options(Options(**(GRPO | change)))


@pytest.mark.parametrize(
    "change",
    [
        {"kl_loss_coef": 0.0, "kl_coef": 0.0, "entropy_coef": 0.0},
        KL | {"kl_loss_coef": 0.0, "kl_loss_type": "low_var_kl"},
        KL | {"kl_loss_coef": 0.1, "ref_update_interval": 5, "ref_ckpt_step": 1},
        {"kl_coef": 0.1, "kl_loss_type": "k2", "ref_load": "r"},
        {"n_samples_per_prompt": 1, "disable_rewards_normalization": True},
        PLUS | {"n_samples_per_prompt": 1, "gamma": 0.9},
        {"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
        {"advantage_estimator": "gspo", "pg_loss_type": "sapo", "sapo_tau_neg": 2.0},
        {"advantage_estimator": "own.estimator", "gamma": 0.9, "n_samples_per_prompt": 1},
        {"use_tis": True, "tis_clip": 3.0},
        {"use_tis": True, "custom_tis_function_path": "own.correction", "rs_level": "sequence", "use_rs": True},
        MIS | {"use_rs": True, "rs_level": "geometric", "rs_upper_bound": 1.01},
        {"use_opsm": True, "opsm_delta": 0.1},
        {"overlong_buffer_len": 100, "overlong_penalty_factor": 0.5},
        DPO | {"dpo_beta": 0.3},
        {"mtp_num_layers": 1, "enable_mtp_training": True, "mtp_loss_scaling_factor": 0.1},
        TEACHER | {"opd_kl_type": "forward", "opd_teacher_ckpt_step": 3, "rollout_temperature": 0.8},
        TEACHER | {"advantage_estimator": "none", "n_samples_per_prompt": 1, "rm_type": None, "label_key": None},
        SERVER | {"opd_teacher_model": "big", "opd_kl_coef": 0.0},
        {"loss_type": "custom_loss", "custom_loss_function_path": "a.b", "eps_clip": 0.1},
    ],
    ids=str,
)
def test_what_fits_passes(change: dict[str, Any]) -> None:
    check_options(Options(**(GRPO | change)))


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, "advantages"),
        ({"num_steps_per_rollout": 2}, "advantages old_logprobs"),
        ({"num_steps_per_rollout": 2, "use_rollout_logprobs": True}, "advantages"),
        ({"keep_old_actor": True}, "advantages old_logprobs"),
        (KL, "advantages reference"),
        ({"kl_coef": 0.1, "ref_load": "r"}, "advantages reference old_logprobs"),
        ({"kl_coef": 0.1, "ref_load": "r", "use_rollout_logprobs": True}, "advantages reference"),
        ({"advantage_estimator": "ppo"}, "advantages critic"),
        ({"advantage_estimator": "remax"}, "advantages greedy"),
        ({"advantage_estimator": "own.estimator"}, "advantages"),
        (DPO, "reference pairs"),
        ({"loss_type": "custom_loss", "num_steps_per_rollout": 2}, "advantages old_logprobs"),
        (KL | {"loss_type": "custom_loss"}, "advantages reference"),
        (TEACHER, "advantages old_logprobs teacher teacher_model"),
        (TEACHER | {"use_rollout_logprobs": True}, "advantages teacher teacher_model"),
        (TEACHER | {"opd_kl_type": "reverse"}, "advantages teacher_model divergence"),
        (SERVER, "advantages old_logprobs teacher teacher_server"),
    ],
    ids=str,
)
def test_needs(change: dict[str, Any], wanted: str) -> None:
    assert needs(Options(**(GRPO | change))) == Needs(
        **{name: name in wanted.split() for name in Needs.__annotations__}
    )


def test_fine_tuning_needs_nothing() -> None:
    assert not any(vars(needs(Options(**SFT))).values())


def test_policy_loss_defaults_to_estimators() -> None:
    """The policy loss is the estimator's unless one is given."""
    assert policy_loss_name(Options()) == "ppo"
    assert policy_loss_name(Options(advantage_estimator="gspo")) == "gspo"
    assert policy_loss_name(Options(advantage_estimator="gspo", pg_loss_type="sapo")) == "sapo"
    assert policy_loss_name(Options(advantage_estimator="own.estimator")) == "ppo"


@pytest.mark.parametrize("kind", get_args(Kind))
def test_what_the_files_declare_exists(kind: Kind) -> None:
    known = {*AlgorithmOptions.__annotations__, *OffPolicyOptions.__annotations__}
    for name, file in algorithm_files(kind).items():
        assert file.title, name
        assert set(file.needs) <= set(NEEDS), name
        assert set(file.options) <= known, name
        assert file.loss in algorithm_files("losses"), name
        assert file.kl in ("token", "reward"), name


def test_nothing_is_known_of_an_own_function() -> None:
    assert find_algorithm_file("losses", "own.loss") is None


def test_options_said_to_be_inert_exist() -> None:
    for values in ({}, KL, MIS, DPO, PLUS, {"loss_type": "custom_loss"}, {"use_tis": True}):
        assert set(inert(Options(**(GRPO | values)))) <= set(Options.model_fields)
