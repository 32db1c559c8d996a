"""What the options of an algorithm, on-policy distillation included, must say together: pure functions of the options.

Invariant: an estimator, loss, correction or teacher without what it needs ends here, before anything starts, and so
does an option that the chosen ones do not read; what each needs and reads is declared in its own file
(`plugin_names.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.options import AlgorithmOptions, OffPolicyOptions, Options
from hpcrl.config.passthrough import dashed
from hpcrl.config.plugin_names import NEEDS, Kind, algorithm_files, find_algorithm_file, is_path
from hpcrl.config.rules.algorithm_needs import needs, policy_loss_name, routing
from hpcrl.config.sections.algorithm import DistillationOptions
from hpcrl.errors import UsageError, failures, raise_together

#: what the losses that are not policy gradients read of the algorithm's options
READ = {
    "sft_loss": {"loss_type", "calculate_per_token_loss"},
    "dpo_loss": {"loss_type", "dpo_beta", "ref_ckpt_step"},
}


def check_algorithm(o: Options) -> None:
    """Raise UsageError for all that an algorithm lacks, or that excludes one another."""
    _known(o)
    rules = [_custom_loss, _reference, _one_kl, _reduction, _overlong, _further_tokens]
    if o.loss_type == "dpo_loss":
        rules.append(_pairs)
    if o.loss_type == "policy_loss":
        rules += [_estimator, _bounds, _old_policy]
    raise_together(failures(rules, o))


def _custom_loss(o: Options) -> None:
    if o.loss_type == "custom_loss" and o.custom_loss_function_path is None:
        raise UsageError("--loss-type custom_loss needs a loss", "give --custom-loss-function-path module.function")


def _overlong(o: Options) -> None:
    if o.overlong_buffer_len is not None and o.overlong_buffer_len > o.rollout_max_response_len:
        raise UsageError(
            f"--overlong-buffer-len {o.overlong_buffer_len} is more than --rollout-max-response-len "
            f"{o.rollout_max_response_len}"
        )


def _further_tokens(o: Options) -> None:
    if o.enable_mtp_training and o.mtp_num_layers is None:
        raise UsageError("--enable-mtp-training needs layers to train", "give --mtp-num-layers")
    for name, field, why in (
        ("mtp_num_layers", "pipeline_model_parallel_layout", "these layers are where the output layer is"),
        ("enable_mtp_training", "optimizer_cpu_offload", "the gradient of these layers is clipped apart"),
    ):
        if getattr(o, name) and o.megatron.get(field):
            raise UsageError(
                f"--{dashed(name)} and --{dashed(field)} exclude each other: {why}", "leave one of them out"
            )


#: (option, its former value) -> what says the same
FORMER = {("kl_loss_type", "unbiased"): "--kl-loss-type k3 with --use-unbiased-kl"}


def chosen(o: Options) -> Iterator[tuple[Kind, str, str | None]]:
    """(kind, option, its value) of every option that names an algorithm; None where none is in use."""
    yield "estimators", "advantage_estimator", o.advantage_estimator
    yield "losses", "pg_loss_type", o.pg_loss_type
    yield "kl", "kl_loss_type", o.kl_loss_type
    yield "corrections", "custom_tis_function_path", o.custom_tis_function_path


def _known(o: Options) -> None:
    for kind, option, name in chosen(o):
        if name is not None and not is_path(name) and name not in algorithm_files(kind):
            if instead := FORMER.get((option, name)):
                raise UsageError(f"--{dashed(option)} {name} is no longer a separate name", f"give {instead}")
            known = ", ".join(algorithm_files(kind))
            raise UsageError(
                f"--{dashed(option)} {name} is unknown", f"known: {known}; or module.function of a custom one"
            )


def _estimator(o: Options) -> None:
    name = o.advantage_estimator
    declared = find_algorithm_file("estimators", name)
    for need in declared.needs if declared else ():
        lacks = f"--advantage-estimator {name} needs {NEEDS[need]}"
        raw = o.disable_rewards_normalization and "disable_rewards_normalization" in declared.options
        if need == "groups" and o.n_samples_per_prompt == 1 and not raw and o.num_rollout != 0:
            hint = "give --n-samples-per-prompt 8 or more; or --advantage-estimator reinforce_plus_plus or remax"
            raise UsageError(f"{lacks}, and --n-samples-per-prompt is 1: every advantage would be 0", hint)
        if need == "teacher" and not o.use_opd:
            raise UsageError(f"{lacks}: every advantage would be 0", "give --use-opd; or another --advantage-estimator")
        if need == "normalize_advantages" and not o.normalize_advantages:
            raise UsageError(lacks, "give it")

    if o.num_rollout and needs(o).critic and o.num_critic_only_steps >= o.num_rollout:
        raise UsageError(
            f"--num-critic-only-steps {o.num_critic_only_steps} leaves none of --num-rollout {o.num_rollout} to the "
            "policy"
        )


def _bounds(o: Options) -> None:
    if o.eps_clip_high is not None and o.eps_clip_high < o.eps_clip:
        raise UsageError(f"--eps-clip-high {o.eps_clip_high:g} is lower than --eps-clip {o.eps_clip:g}")
    if o.tis_clip_low > o.tis_clip:
        raise UsageError(f"--tis-clip-low {o.tis_clip_low:g} is higher than --tis-clip {o.tis_clip:g}")
    if o.use_tis and o.custom_tis_function_path == "mis" and o.tis_mode != "truncate" and not o.tis_clip_low:
        raise UsageError(
            f"--tis-mode {o.tis_mode} has no lower bound: --tis-clip-low is 0",
            f"give it; slime's default is 1 / --tis-clip, {1 / o.tis_clip:g}",
        )
    if o.use_tis and o.tis_batch_normalize and o.tis_level == "geometric":
        raise UsageError(
            "--tis-batch-normalize divides by the mean weight of tokens or of responses, not by that of --tis-level "
            "geometric",
            "leave it out, or give --tis-level token or sequence",
        )
    high = o.tis_clip if o.rs_upper_bound is None else o.rs_upper_bound
    low = (o.tis_clip_low or 1 / o.tis_clip) if o.rs_lower_bound is None else o.rs_lower_bound
    if o.use_rs and low > high:
        raise UsageError(
            f"--rs-lower-bound {low:g} is higher than the upper bound {high:g}",
            "give --rs-lower-bound and --rs-upper-bound",
        )


def _old_policy(o: Options) -> None:
    if not o.use_rollout_logprobs:
        return
    if o.use_tis:
        raise UsageError(
            "--use-rollout-logprobs and --use-tis exclude each other: with the first the ratio is to the engine "
            "already",
            "leave one of them out",
        )
    if o.use_routing_replay and not o.use_rollout_routing_replay:
        raise UsageError(
            "--use-routing-replay replays what the old policy's pass chose, and with --use-rollout-logprobs there is "
            "no such pass",
            "give --use-rollout-routing-replay instead: what the engine chose",
        )
    if o.keep_old_actor:
        raise UsageError(
            "--use-rollout-logprobs and --keep-old-actor both choose the old log-probs", "leave one of them out"
        )


def _one_kl(o: Options) -> None:
    if o.kl_coef and o.kl_loss_coef:
        raise UsageError(
            f"--kl-coef {o.kl_coef:g} and --kl-loss-coef {o.kl_loss_coef:g} both weigh the KL", "leave one of them out"
        )


def _reference(o: Options) -> None:
    if needs(o).reference and o.ref_load is None and not o.lora_rank:  # whose base is one
        why = (
            "--loss-type dpo_loss"
            if o.loss_type == "dpo_loss"
            else "--use-kl-loss"
            if o.use_kl_loss
            else f"--kl-coef {o.kl_coef:g}"
        )
        raise UsageError(f"{why} needs a reference model", "give --ref-load; the directory of --hf-checkpoint will do")


def _pairs(o: Options) -> None:
    if o.n_samples_per_prompt != 2:
        raise UsageError(
            f"--loss-type dpo_loss compares two responses, --n-samples-per-prompt is {o.n_samples_per_prompt}",
            "give --n-samples-per-prompt 2",
        )
    if o.step_batch_size % (2 * o.data_parallel_size):
        raise UsageError(
            f"{o.step_batch_size} samples of one optimizer step are not whole pairs on each of {o.data_parallel_size} "
            "data-parallel ranks",
            "change --global-batch-size or --num-steps-per-rollout",
        )


def _reduction(o: Options) -> None:
    if o.pg_loss_divisor is None:
        return
    for other in ("calculate_per_token_loss", "custom_pg_loss_reducer_function_path"):
        if getattr(o, other):
            raise UsageError(f"--pg-loss-divisor and --{dashed(other)} exclude each other", "leave one of them out")


# ---- what would have no effect


def inert_in_algorithm(o: Options) -> Iterator[tuple[str, str]]:
    """(names, why) of the algorithm's options that do nothing in this combination."""
    every = [*AlgorithmOptions.__annotations__, *OffPolicyOptions.__annotations__]
    if o.loss_type != "custom_loss":
        yield "custom_loss_function_path", f"--loss-type is {o.loss_type}"
    if o.loss_type in READ:
        yield " ".join(name for name in every if name not in READ[o.loss_type]), f"--loss-type is {o.loss_type}"
    elif o.loss_type == "policy_loss":
        yield "dpo_beta", "--loss-type is policy_loss"
        yield from _unread(o)
        yield from _without_kl(o)
        yield from _without_correction(o)
    if routing(o) == "old" and not needs(o).old_logprobs:
        why = (
            "one optimizer step a rollout is its own old policy: --num-steps-per-rollout 2 or more, or "
            "--use-rollout-routing-replay"
        )
        yield "use_routing_replay", why
    yield "keep_old_actor", "every rollout is trained on with the weights that it was made for"
    if o.ref_load is None:
        yield "ref_ckpt_step", "--ref-load is not given"
    if not o.enable_mtp_training:
        yield "mtp_loss_scaling_factor", "--enable-mtp-training is not given"
    if o.overlong_buffer_len is None:
        yield "overlong_penalty_factor", "--overlong-buffer-len is not given"


def _unread(o: Options) -> Iterator[tuple[str, str]]:
    """What other estimators, losses and corrections read, but not the chosen ones."""
    which: tuple[tuple[Kind, str, str], ...] = (
        ("estimators", o.advantage_estimator, "--advantage-estimator is"),
        ("losses", policy_loss_name(o), "the policy loss is"),
        ("corrections", o.custom_tis_function_path or "tis", "the correction is"),
    )
    for kind, name, said in which:
        if (declared := find_algorithm_file(kind, name)) is not None:
            known = {option for file in algorithm_files(kind).values() for option in file.options}
            yield " ".join(sorted(known - set(declared.options))), f"{said} {name}"
    if o.disable_rewards_normalization:
        yield "disable_grpo_std_normalization", "--disable-rewards-normalization is given"
    if not needs(o).critic and not is_path(o.advantage_estimator):
        critic = "value_clip num_critic_only_steps critic_load critic_lr critic_lr_warmup_iters"
        yield critic, f"--advantage-estimator {o.advantage_estimator} has no critic"


def _without_kl(o: Options) -> Iterator[tuple[str, str]]:
    if not o.use_kl_loss:
        yield "kl_loss_coef use_unbiased_kl", "--use-kl-loss is not given"
        if not o.kl_coef:
            yield "kl_loss_type", "neither --use-kl-loss nor --kl-coef is given"
            yield "ref_update_interval", "neither --use-kl-loss nor --kl-coef asks for a reference"


def _without_correction(o: Options) -> Iterator[tuple[str, str]]:
    if not o.use_tis:
        known = {option for file in algorithm_files("corrections").values() for option in file.options}
        yield " ".join(sorted({"custom_tis_function_path"} | known)), "--use-tis is not given"
    elif not o.use_rs:
        yield "rs_level rs_lower_bound rs_upper_bound rs_veto_threshold", "--use-rs is not given"
    if not o.use_opsm:
        yield "opsm_delta", "--use-opsm is not given"


# ---- distillation rules

TYPES = "--opd-type vllm with --opd-teacher-url, or --opd-type megatron with --opd-teacher-load"


def check_distillation(o: Options) -> None:
    """Raise UsageError for the first thing that a teacher lacks or cannot say."""
    if not o.use_opd or o.loss_type not in ("policy_loss", "custom_loss"):
        return
    if o.opd_type is None:
        raise UsageError("--use-opd does not say where the teacher is", f"give {TYPES}")
    if o.opd_type == "megatron":
        if o.opd_teacher_load is None:
            raise UsageError("--opd-type megatron needs the teacher's weights", "give --opd-teacher-load")
        return
    if o.opd_teacher_url is None:
        raise UsageError("--opd-type vllm needs the teacher's address", "give --opd-teacher-url")
    if not o.opd_teacher_url.startswith(("http://", "https://")):
        raise UsageError(
            f"--opd-teacher-url {o.opd_teacher_url} is not an address", "it begins with http:// or https://"
        )
    if o.opd_kl_type != "sampled":
        raise UsageError(
            f"--opd-kl-type {o.opd_kl_type} needs the teacher's whole vocabulary, a server gives the sampled tokens "
            "alone",
            "give --opd-type megatron, or leave --opd-kl-type out",
        )
    if o.rollout_temperature != 1.0:
        raise UsageError(
            "--opd-type vllm gives log-probs at temperature 1, the student samples at --rollout-temperature "
            f"{o.rollout_temperature:g}",
            "leave the temperature at 1, or give --opd-type megatron",
        )


def inert_in_distillation(o: Options) -> Iterator[tuple[str, str]]:
    """(names, why) of the options of distillation that do nothing in this combination."""
    every = list(DistillationOptions.__annotations__)
    if o.loss_type in ("sft_loss", "dpo_loss"):
        yield " ".join(every), f"--loss-type is {o.loss_type}"
    elif not o.use_opd:
        yield " ".join(every[1:]), "--use-opd is not given"
    elif o.opd_type == "vllm":
        yield "opd_teacher_load opd_teacher_ckpt_step", "--opd-type is vllm"
    elif o.opd_type == "megatron":
        yield "opd_teacher_url opd_teacher_model", "--opd-type is megatron"
