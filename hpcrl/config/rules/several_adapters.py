"""Several adapters over the same weights in one run: the tables `[adapter.NAME]` of a recipe.

    lora_rank = 16
    [adapter.algebra]
    prompt_data = ["{recipe}/algebra.jsonl"]
    [adapter.geometry]
    prompt_data = ["{recipe}/geometry.jsonl"]
    lr = 1e-4

Invariants: an adapter is trained by the options of the run with those of its table in their place, and these alone are
checked; what all adapters share (weights, layout, engines) no table can change.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from hpcrl.config.options import Options
from hpcrl.config.rules.values import build_options
from hpcrl.errors import UsageError, parts_of, raise_together

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,-]*\Z")  #: of an adapter: a directory has it too
#: what an adapter may have of its own
OWN = frozenset(
    re.findall(
        r"\w+",
        """
        seed num_rollout num_epoch
        prompt_data input_key label_key rejected_key metadata_key tool_key apply_chat_template
        apply_chat_template_kwargs overlong_prompts rollout_shuffle rollout_seed
        rollout_batch_size n_samples_per_prompt rollout_max_response_len rollout_max_prompt_len rollout_temperature
        rollout_top_p rollout_top_k rollout_min_p rollout_stop rollout_stop_token_ids rollout_skip_special_tokens
        over_sampling_batch_size dynamic_sampling_filter_path partial_rollout mask_offpolicy_in_partial_rollout
        buffer_filter_path custom_generate_function_path custom
        rm_type custom_rm_path group_rm rm_url reward_key eval_reward_key
        eval_interval eval_prompt_data eval_config eval_input_key eval_label_key eval_tool_key
        n_samples_per_eval_prompt eval_temperature eval_top_p eval_top_k eval_min_p eval_max_response_len
        eval_max_prompt_len eval_min_new_tokens skip_eval_before_train log_passrate
        custom_loss_function_path advantage_estimator disable_grpo_std_normalization disable_rewards_normalization
        normalize_advantages gamma lambd overlong_buffer_len overlong_penalty_factor pg_loss_type eps_clip
        eps_clip_high eps_clip_c sapo_tau_pos sapo_tau_neg dpo_beta entropy_coef kl_coef use_kl_loss kl_loss_coef
        kl_loss_type use_unbiased_kl calculate_per_token_loss pg_loss_divisor
        lora_alpha use_rslora lora_dropout lora_adapter_path
        global_batch_size num_steps_per_rollout save_interval
        lr min_lr lr_decay_style lr_warmup_iters lr_warmup_fraction lr_warmup_init lr_decay_iters
        lr_wsd_decay_style lr_wsd_decay_iters weight_decay start_weight_decay end_weight_decay
        weight_decay_incr_style
        """,
    )
)
GRADERS = 8  #: processes that grade, of all adapters together, where --reward-num-workers does not say
#: options that do not go with several adapters, and why
_NOT_YET = {
    "colocate": "adapters are trained while engines sample for the others, on GPUs of their own",
    "save_debug_rollout_data": "all adapters would write the same files",
    "load_debug_rollout_data": "it replays the samples of one policy",
    "debug_rollout_only": "nothing would be trained",
    "debug_train_only": "it replays the samples of one policy",
    "non_persistent_save_interval": "copies in memory hold one adapter",
    "rollout_external_engine_addrs": "engines of another job were started without room for them",
}


def adapter_options(o: Options) -> dict[str, Options]:
    """The options of each adapter of a run, by its name, in the order of the recipe; {} for a run of one policy.

    Raises:
        UsageError: for what no adapter can have of its own, and a value that is out of range or of another type.
    """
    raise_together(_tables(o.adapter))
    found = {}
    for name, table in o.adapter.items():
        values = o.model_dump() | table | {"adapter": {}, "name": f"{o.name}-{name}"}
        values["custom"] = {**o.custom, **table.get("custom", {})}
        values["save"] = f"{o.save}/{name}" if o.save else None
        values["reward_num_workers"] = max(1, (o.reward_num_workers or GRADERS) // len(o.adapter))
        try:
            found[name] = build_options(values)
        except UsageError as error:
            _of_adapter(name, error)
    return found


def policies_of(o: Options) -> list[Options]:
    """The options of every policy that a run trains: of each of its adapters, or its own."""
    return [*adapter_options(o).values()] or [o]


def rollouts_of(o: Options) -> int | None:
    """All rollouts of a run, of its adapters together; None if epochs say how many."""
    each = [own.num_rollout for own in policies_of(o)]
    return None if None in each else sum(filter(None, each))


def check_several(
    o: Options,
    given: Collection[str] | None,
    check: Callable[[Options, Collection[str]], None],
    inert: Callable[[Options], Mapping[str, str]],
) -> None:
    """Raise UsageError for all that is wrong with a run of several adapters.

    Args:
        given: the options of the whole run whose lack of effect in every adapter is an error; default: all that were
            set.
        check, inert: `option_rules.check_options` and `inert`.
    """
    each = adapter_options(o)
    raise_together(_together(o))
    nowhere = set(o.model_fields_set if given is None else given).intersection(*(inert(own) for own in each.values()))
    wrong: list[UsageError] = []
    for name, own in each.items():
        try:
            check(own, [*o.adapter[name], *sorted(nowhere)])
        except UsageError as error:
            try:
                _of_adapter(name, error)
            except UsageError as named:
                wrong += parts_of(named)
    raise_together(wrong)


def _tables(tables: Mapping[str, Any]) -> list[UsageError]:
    wrong = []
    for name, table in tables.items():
        if not NAME.match(name):
            wrong.append(
                UsageError(f"[adapter.{name}]: the name cannot be that of a directory", "use letters, digits and -")
            )
        if not isinstance(table, dict):
            wrong.append(UsageError(f"adapter.{name} is not a table", f"begin it with [adapter.{name}]"))
            continue
        for key in table.keys() - OWN:
            what = "an adapter has none of its own" if key in Options.model_fields else "there is no such option"
            wrong.append(UsageError(f"[adapter.{name}] {key}: {what}", _hint(key)))
    return wrong


def _hint(key: str) -> str:
    if key in Options.model_fields:
        return "all adapters share it: write it before the tables"
    near = difflib.get_close_matches(key, sorted(OWN), n=1)
    return f"did you mean {near[0]}?" if near else "see docs/lora.md"


def _together(o: Options) -> list[UsageError]:
    if not o.lora_rank:
        return [UsageError("[adapter]: --lora-rank is not given", "give it, or leave the tables out")]
    wrong = [
        UsageError(f"--{name.replace('_', '-')} and [adapter.NAME] exclude each other: {why}", "leave one of them out")
        for name, why in _NOT_YET.items()
        if getattr(o, name)
    ]
    if o.loop != "sync":
        wrong.append(
            UsageError(
                f"--loop {o.loop}: with several adapters engines sample for the others while one is trained",
                "leave --loop out",
            )
        )
    if o.lora_serve == "merged":
        wrong.append(UsageError("--lora-serve merged: engines hold the weights of one policy", "leave it out"))
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):  # their states are not in torch's places
        if o.megatron.get(name):
            flag = f"--{name.replace('_', '-')}"
            wrong.append(UsageError(f"{flag} and [adapter.NAME] exclude each other", "an adapter's state is small"))
    if "ppo" in (o.advantage_estimator, *(table.get("advantage_estimator") for table in o.adapter.values())):
        wrong.append(UsageError("--advantage-estimator ppo: several adapters have no critic", "use another estimator"))
    return wrong


def _of_adapter(name: str, error: UsageError) -> None:
    """Raise it again, with the adapter's name."""
    raise_together([UsageError(f"adapter {name}: {part.what}", part.hint) for part in parts_of(error)])
