"""Options of sampling: sizes and sampling parameters of a rollout, custom generate functions (tools, agents), and the
custom functions of every other plug-in point, of which docs/customise.md has an example each.
"""

from __future__ import annotations

from typing import Any

from hpcrl.config.sections import Base, opt


class RolloutOptions(Base):
    """rollout: sampling"""

    rollout_batch_size: int = opt(32, "prompts (groups) of one rollout", "slime", ge=1)
    n_samples_per_prompt: int = opt(
        1, "responses to each prompt; grpo compares them and needs at least 2", "slime", ge=1
    )
    rollout_max_response_len: int = opt(1024, "maximum tokens of a response", "slime", ge=1)
    rollout_max_prompt_len: int | None = opt(None, "longer prompts are dropped and counted", "slime", ge=1)
    rollout_max_context_len: int | None = opt(
        None, "maximum tokens of prompt and response together; sets the engine's context", "slime", ge=2
    )
    rollout_temperature: float = opt(
        1.0, "sampling temperature; the trainer also divides its logits by it", "slime", gt=0
    )
    rollout_top_p: float = opt(1.0, "sample from the likeliest tokens with this total probability", "slime", gt=0, le=1)
    rollout_top_k: int = opt(-1, "sample from this many likeliest tokens; -1: all", "slime", ge=-1)
    rollout_stop: list[str] = opt([], "strings that end a response", "slime")
    rollout_stop_token_ids: list[int] = opt([], "token ids that end a response", "slime")
    rollout_skip_special_tokens: bool = opt(
        False,
        "leave special tokens out of the text for stop strings and rewards",
        "slime",
    )
    over_sampling_batch_size: int | None = opt(
        None,
        "groups to sample at a time until --rollout-batch-size have passed the filter; the rest is ended; default "
        "--rollout-batch-size",
        "slime",
        ge=1,
    )
    dynamic_sampling_filter_path: str | None = opt(
        None,
        "filter of finished groups: check_reward_nonzero_std, check_reward_nonzero_std_with_fallback, or "
        "module.function of your own: (options, samples) -> bool",
        "slime",
    )
    partial_rollout: bool = opt(
        False,
        "keep the rest of a full batch: unfinished responses continue later from their tokens, finished groups wait",
        "slime",
    )
    mask_offpolicy_in_partial_rollout: bool = opt(
        False, "loss mask 0 for tokens of older policies in continued responses", "slime"
    )
    buffer_filter_path: str | None = opt(
        None,
        "choice of kept groups to continue: pop_first, the oldest (default), or module.function of your own: "
        "(options, rollout_id, buffer, count) -> groups",
        "slime",
    )
    max_staleness: int | None = opt(
        None,
        "policy versions that a token may lag behind the trainer; default: any with --partial-rollout, as in slime; "
        "else the lag of the loop: 0 in sync, --update-weights-interval rollouts in async, twice that in fully-async",
        ge=0,
    )
    rollout_server_concurrency: int = opt(
        512, "maximum samples in flight per engine (slime: --sglang-server-concurrency)", ge=1
    )


# ---- agents


class AgentOptions(Base):
    """rollout: several turns, tools, agents (docs/customise.md)"""

    custom_generate_function_path: str | None = opt(
        None,
        "module.function that makes a response: async (args, sample, sampling_params) -> sample, list of samples, or "
        "None",
        "slime",
    )


# ---- plugins


class PluginOptions(Base):
    """custom functions, each a module.function (docs/customise.md)"""

    rollout_function_path: str | None = opt(
        None,
        "(options, rollout_id, data_source, *, evaluation) -> groups: makes a rollout in place of hpcrl",
        "slime",
    )
    eval_function_path: str | None = opt(
        None,
        "(options, rollout_id, data_source, *, evaluation) -> samples, or numbers, by set: evaluates in place of hpcrl",
        "slime",
    )
    data_source_path: str | None = opt(
        None,
        "class made with (options), with take, state and restore: gives the prompts in place of --prompt-data",
        "slime",
    )
    rollout_sample_hook_path: list[str] = opt(
        [],
        "(options, sample, *, rollout_id, evaluation) on every sample before its reward; several are called in order",
        "slime",
    )
    rollout_sample_filter_path: str | None = opt(
        None, "(options, groups): sets remove_sample of samples to leave out of the loss", "slime"
    )
    rollout_all_samples_process_path: str | None = opt(
        None, "(options, groups, data_source): sees all samples of a rollout, dropped ones included", "slime"
    )
    custom_rollout_log_function_path: str | None = opt(
        None,
        "(rollout_id, options, samples, metrics, seconds): adds metrics; true: in place of the usual ones of rollout/",
        "slime",
    )
    custom_eval_rollout_log_function_path: str | None = opt(
        None, "(rollout_id, options, data, metrics): the same of evaluations", "slime"
    )
    custom_reward_post_process_path: str | None = opt(
        None, "(options, samples) -> raw and processed rewards: in place of the group's normalisation", "slime"
    )
    custom_convert_samples_to_train_data_path: str | None = opt(
        None, "(options, samples) -> samples, or slime's train data, for the trainer", "slime"
    )
    custom_model_provider_path: str | None = opt(
        None,
        "(options, config, build, *, pre_process, post_process, vp_stage) -> GPTModel: makes the model of a rank, with "
        "the same parameters",
        "slime",
    )
    custom_update_weight_post_write_path: str | None = opt(
        None,
        "(options, version_dir, rollout_engines), after --weight-transfer disk has written an update",
        "slime",
    )
    custom_megatron_init_path: str | None = opt(None, "(options), after Megatron has made its groups", "slime")
    custom_megatron_before_log_prob_hook_path: str | None = opt(
        None, "(options, model, store_prefix), before each pass for log-probs", "slime"
    )
    custom_megatron_before_train_step_hook_path: str | None = opt(
        None, "(options, rollout_id, step_id, model, optimizer, scheduler), before each optimizer step", "slime"
    )
    rollout_data_postprocess_path: str | None = opt(
        None,
        "(options, rollout_id, rollout_data), after log-probs are known: may remove tokens from the loss masks",
        "slime",
    )
    custom_config_path: str | None = opt(
        None,
        "YAML file of your own settings: custom functions read them as options.NAME, like those of [custom]",
        "slime",
    )
    custom: dict[str, Any] = opt(
        {}, "your own settings, the table [custom] of a recipe: custom functions read them as options.NAME"
    )
