"""Own functions that are called besides what an option of another section chooses; docs/customise.md has an example of
each."""

from __future__ import annotations

from typing import Any

from hpcrl.config.option_fields import Base, opt


class PluginOptions(Base):
    """own functions, each a module.function (docs/customise.md)"""

    rollout_function_path: str | None = opt(
        None,
        "(options, rollout_id, data_source, *, evaluation) -> groups: makes a rollout in place of hpcrl's own way",
        "slime",
    )
    eval_function_path: str | None = opt(
        None,
        "(options, rollout_id, data_source, *, evaluation) -> samples, or numbers, by set: evaluates in place of hpcrl's own way",
        "slime",
    )
    data_source_path: str | None = opt(
        None,
        "a class that is made with (options) and has take, state and restore: gives the prompts in place of --prompt-data",
        "slime",
    )
    rollout_sample_hook_path: list[str] = opt(
        [],
        "(options, sample, *, rollout_id, evaluation) on every sample before its reward; several are called in order",
        "slime",
    )
    rollout_sample_filter_path: str | None = opt(
        None, "(options, groups): sets remove_sample of samples that are to be out of the loss", "slime"
    )
    rollout_all_samples_process_path: str | None = opt(
        None, "(options, groups, data_source): is shown all samples of a rollout, dropped ones included", "slime"
    )
    custom_rollout_log_function_path: str | None = opt(
        None,
        "(rollout_id, options, samples, metrics, seconds): adds metrics; true: instead of the usual ones of rollout/",
        "slime",
    )
    custom_eval_rollout_log_function_path: str | None = opt(
        None, "(rollout_id, options, data, metrics): the same of evaluations", "slime"
    )
    custom_reward_post_process_path: str | None = opt(
        None, "(options, samples) -> raw and processed rewards: in place of the group's normalisation", "slime"
    )
    custom_convert_samples_to_train_data_path: str | None = opt(
        None, "(options, samples) -> samples, or slime's train data: what the trainer gets of a rollout", "slime"
    )
    custom_model_provider_path: str | None = opt(
        None,
        "(options, config, build, *, pre_process, post_process, vp_stage) -> GPTModel: makes the model of a rank, with the same parameters",
        "slime",
    )
    custom_update_weight_post_write_path: str | None = opt(
        None,
        "(options, version_dir, rollout_engines), once --weight-transfer disk has written the files of an update",
        "slime",
    )
    custom_megatron_init_path: str | None = opt(None, "(options), once Megatron's groups are there", "slime")
    custom_megatron_before_log_prob_hook_path: str | None = opt(
        None, "(options, model, store_prefix), before each pass for log-probs", "slime"
    )
    custom_megatron_before_train_step_hook_path: str | None = opt(
        None, "(options, rollout_id, step_id, model, optimizer, scheduler), before each optimizer step", "slime"
    )
    rollout_data_postprocess_path: str | None = opt(
        None,
        "(options, rollout_id, rollout_data), once log-probs are known: may take tokens out of the loss masks",
        "slime",
    )
    custom_config_path: str | None = opt(
        None,
        "a YAML file of settings of your own: own functions read them as options.NAME, as those of [custom]",
        "slime",
    )
    custom: dict[str, Any] = opt(
        {}, "settings of your own, in a recipe the table [custom]: own functions read them as options.NAME"
    )
