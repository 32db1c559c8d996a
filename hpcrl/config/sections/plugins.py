"""Own functions that are called besides what an option of another section chooses; docs/customise.md has an example of each."""

from __future__ import annotations

from hpcrl.config.option_fields import Base, opt


class PluginOptions(Base):
    """own functions, each a module.function (docs/customise.md)"""

    custom_megatron_init_path: str | None = opt(None, "(options), once Megatron's groups are there", "slime")
    custom_megatron_before_log_prob_hook_path: str | None = opt(
        None, "(options, model, store_prefix), before each pass for log-probs", "slime"
    )
    custom_megatron_before_train_step_hook_path: str | None = opt(
        None, "(options, rollout_id, step_id, model, optimizer, scheduler), before each optimizer step", "slime"
    )
    rollout_data_postprocess_path: str | None = opt(
        None, "(options, rollout_id, rollout_data), once log-probs are known: may take tokens out of the loss masks", "slime"
    )
