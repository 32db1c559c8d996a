"""What options must say together: a pure function of the resolved options.

Invariant: a combination that cannot run, or an option that would have no effect in it, ends here as one UsageError that
names the flags; nothing was started.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from hpcrl.config.eval_sets import eval_sets
from hpcrl.config.options import Options
from hpcrl.config.passthrough import dashed
from hpcrl.config.plugin_names import check_key, is_path, needing_labels, read_words
from hpcrl.config.plugin_points import POINTS, paths_of
from hpcrl.config.prompt_words import read_words as read_prompt_words
from hpcrl.config.rules.algorithm_rules import (
    check_algorithm,
    check_distillation,
    inert_in_algorithm,
    inert_in_distillation,
)
from hpcrl.config.rules.engine_rules import (
    check_engines,
    check_external,
    check_speculation,
    check_weights,
    inert_in_external,
    inert_in_weights,
)
from hpcrl.config.rules.layout_rules import check_ranks, check_sharing, check_virtual_stages, inert_in_sharing
from hpcrl.config.rules.passed_through_rules import check_engine_settings, check_passed_through
from hpcrl.config.rules.run_rules import check_looking, check_loop, inert_in_loop
from hpcrl.config.rules.schedules import check_schedules
from hpcrl.errors import UsageError, failures, raise_together
from hpcrl.toolbox.plugins import PluginRoom

#: each file is a built-in filter, named as the option's value
FILTERS = Path(__file__).parents[2] / "rollout" / "filters"


def check_options(options: Options, given: Collection[str] | None = None) -> None:
    """UsageError for all that is wrong with these options.

    given: the options that the user has set and whose lack of effect is an error; default: all that were set.
    """
    layout = failures((check_ranks, check_virtual_stages, check_engines, check_sharing, check_external), options)
    wrong = (
        failures((_needed, _saving, _sampling, _filling, _rewards, _evaluation, check_weights, check_looking), options)
        + layout
    )
    wrong += failures((check_passed_through, check_engine_settings, check_speculation), options)
    batches = [] if layout else failures((_batches,), options)
    wrong += batches + failures((_packing,), options)
    if not layout and not batches:  # the others count ranks and steps, which must be whole numbers first
        wrong += failures((check_algorithm, check_distillation, check_schedules, check_loop), options)
    raise_together(wrong)
    without = inert(options)
    names = sorted(options.model_fields_set) if given is None else given
    raise_together(
        [_no_effect(name, without[name]) for name in names if name in without and not _is_default(options, name)]
    )


def _is_default(options: Options, name: str) -> bool:
    return getattr(options, name) == type(options).model_fields[name].get_default(call_default_factory=True)


def _no_effect(name: str, why: str) -> UsageError:
    return UsageError(f"{flag(name)} has no effect here: {why}", "leave it out")


def flag(name: str) -> str:
    """An option as an error names it."""
    return f"--{dashed(name)}"


# ---- what cannot run


def _needed(o: Options) -> None:
    if o.hf_checkpoint is None:
        raise UsageError("no model given", "give --hf-checkpoint, a Hugging Face directory")
    given = o.prompt_data or o.data_source_path
    if given is None and o.load_debug_rollout_data is None and not o.only_evaluates:
        raise UsageError("no prompts given", "give --prompt-data, a .jsonl or .parquet file")
    if o.num_rollout is None and o.num_epoch is None:
        raise UsageError("the length of the run is not given", "give --num-rollout or --num-epoch")
    if o.num_rollout == 0 and o.eval_interval is None:
        raise UsageError(
            "--num-rollout 0 without --eval-interval leaves nothing to do", "give --eval-interval to evaluate only"
        )


def _saving(o: Options) -> None:
    kept, each = o.save_retain_interval, o.save_interval
    if kept and each and kept % each:
        raise UsageError(
            f"--save-retain-interval {kept} is not a multiple of --save-interval {each}", "change one of them"
        )


def check_run_dir(template: str) -> None:
    """UsageError unless `template` has no other placeholders than {name} and {time}."""
    try:
        template.format(name="", time="")
    except (LookupError, ValueError):
        raise UsageError(f"--run-dir {template}: only {{name}} and {{time}} may stand in braces") from None


def _batches(o: Options) -> None:
    samples = o.samples_per_rollout
    batch = o.global_batch_size
    steps = o.num_steps_per_rollout
    said = f"a rollout of {samples} samples (--rollout-batch-size x --n-samples-per-prompt)"
    if steps and samples % steps:
        raise UsageError(f"{said} cannot be divided into --num-steps-per-rollout {steps} steps")
    if batch and samples % batch:
        raise UsageError(f"{said} cannot be divided by --global-batch-size {batch}")
    if batch and steps and batch * steps != samples:
        raise UsageError(
            f"--global-batch-size {batch} x --num-steps-per-rollout {steps} is not {said}", "leave one of them out"
        )
    if o.step_batch_size % o.data_parallel_size:
        raise UsageError(
            f"{o.step_batch_size} samples of one optimizer step cannot be divided by {o.data_parallel_size} "
            "data-parallel ranks"
        )
    own = o.step_batch_size // o.data_parallel_size
    if own % o.micro_batch_multiple:
        raise UsageError(
            f"with virtual pipeline stages the {own} samples of a data-parallel rank in one optimizer step must be a "
            "multiple of "
            f"{o.micro_batch_multiple}",
            "change --global-batch-size, --pipeline-model-parallel-size or the number of ranks",
        )


def _packing(o: Options) -> None:
    if o.use_dynamic_batch_size and o.max_tokens_per_gpu is None:
        raise UsageError("--use-dynamic-batch-size needs a limit", "give --max-tokens-per-gpu")
    if o.log_probs_chunk_size == 0:
        raise UsageError("--log-probs-chunk-size 0 leaves no row", "give 1 or more, or -1 for all of a micro-batch")


def _sampling(o: Options) -> None:
    if o.load_debug_rollout_data is None and not o.only_evaluates:
        label_key(o)
    read_prompt_words(o.prompt_data, "--prompt-data")
    context = o.rollout_max_context_len
    prompt = o.rollout_max_prompt_len
    if context and prompt and prompt >= context:
        raise UsageError(
            f"--rollout-max-prompt-len {prompt} leaves no room for a response in --rollout-max-context-len {context}"
        )
    if o.truncated_sampling and o.rollout_temperature != 1:
        raise UsageError(
            f"--rollout-temperature {o.rollout_temperature:g} with --rollout-top-p, --rollout-top-k or "
            "--rollout-min-p: engines have "
            "log-probs either of the whole distribution at temperature 1, or of what is left of it, and the trainer "
            "computes "
            "neither",
            "keep --rollout-temperature 1, or sample from all tokens",
        )


def _filling(o: Options) -> None:
    if o.over_sampling_batch_size is not None and o.over_sampling_batch_size < o.rollout_batch_size:
        raise UsageError(
            f"--over-sampling-batch-size {o.over_sampling_batch_size} is less than --rollout-batch-size "
            f"{o.rollout_batch_size}",
            "it is how many groups are issued at a time",
        )
    for name, room in (("dynamic_sampling_filter_path", "dynamic"), ("buffer_filter_path", "buffer")):
        value, built_in = getattr(o, name), PluginRoom(FILTERS / room)
        if value is not None and not is_path(value) and value not in built_in:
            raise UsageError(
                f"{flag(name)} {value} is not a filter",
                built_in.hint(value, "a function of your own is module.function"),
            )
    if o.partial_rollout and o.deterministic_mode:
        raise UsageError(
            "--partial-rollout and --deterministic-mode exclude each other: how far a response has come when it is "
            "ended depends on the clock",
            "leave one of them out",
        )


def _rewards(o: Options) -> None:
    if not o.needs_engines:
        return
    unread = o.advantage_estimator == "none" and o.eval_interval is None  # a teacher says what is learned
    own = (
        o.learns_labels or o.only_evaluates or o.custom_generate_function_path
    )  # a held-out set, or the function, says the reward
    if not o.grades and not unread and not own:
        raise UsageError("no reward given", "give --rm-type or --custom-rm-path")
    if o.rm_type and o.custom_rm_path:
        raise UsageError("--rm-type and --custom-rm-path exclude each other", "leave one of them out")
    words = read_words(o.rm_type)
    if o.group_rm and o.advantage_estimator == "remax":
        raise UsageError(
            "--group-rm grades the responses to a prompt together, remax's greedy one alone", "leave one of them out"
        )
    if any(item.file == "remote_rm" for item in words) and o.rm_url is None:
        raise UsageError("--rm-type remote_rm has nowhere to ask", "give --rm-url")
    if o.rm_url is not None and not o.rm_url.startswith(("http://", "https://")):
        raise UsageError(f"--rm-url {o.rm_url} is not an address", "it begins with http:// or https://")
    for name in ("reward_key", "eval_reward_key"):
        if (key := getattr(o, name)) is not None and words:
            check_key(words, key, flag(name))


def _evaluation(o: Options) -> None:
    if o.eval_config is not None and o.eval_prompt_data:
        raise UsageError("--eval-config and --eval-prompt-data both name the held-out sets", "leave one of them out")
    if o.eval_interval is not None and o.eval_config is None and not o.eval_prompt_data:
        raise UsageError(
            "--eval-interval needs held-out prompts", "give --eval-prompt-data NAME PATH, or --eval-config"
        )
    # a file that `prepare` is yet to write is read when it is there
    if o.eval_interval is not None and (o.eval_config is None or Path(o.eval_config).is_file()):
        eval_sets(o)


def label_key(o: Options) -> str | None:
    """The key of the label in the training prompts; None where no label is wanted.

    UsageError if the loss or the reward needs one and no key is given.
    """
    if o.label_key is not None:
        return o.label_key
    if o.loss_type == "dpo_loss" and o.learns_labels:
        raise UsageError(f"--loss-type {o.loss_type} learns the label", "give --label-key")
    if o.learns_labels and not o.apply_chat_template:
        raise UsageError(
            f"--loss-type {o.loss_type} without --label-key learns the assistant's turns of chat messages",
            "give --label-key, or --apply-chat-template",
        )
    comparing = [] if o.custom_rm_path or o.learns_labels else needing_labels(read_words(o.rm_type))
    if comparing:
        raise UsageError(f"--rm-type {comparing[0]} compares with the label", "give --label-key")
    return None


# ---- what would have no effect

_NO_ENGINE = "what the prompt file holds is learned, and without --eval-interval no engine is asked"
#: what is said to engines, and to what grades their answers
_OF_ENGINES = (
    "rollout_external_engine_addrs rollout_external_engine_keys rollout_num_gpus_per_engine engine_start_timeout "
    "engine_restarts engine_hang_timeout update_timeout request_timeout rollout_server_concurrency "
    "rollout_max_context_len "
    "rollout_temperature rollout_top_p rollout_top_k rollout_min_p rollout_stop rollout_stop_token_ids "
    "rollout_skip_special_tokens rm_type custom_rm_path rm_url reward_key reward_num_workers reward_cpu_limit "
    "reward_timeout "
    "reward_memory_gb reward_max_failed update_weight_buffer_size custom_generate_function_path weight_transfer "
    "weight_update "
    "weight_update_check_interval update_weight_disk_dir check_weight_update_equal vllm "
    "custom_update_weight_post_write_path"
)


def inert(o: Options) -> dict[str, str]:
    """Options that do nothing in this combination -> why."""
    return {name: why for names, why in (*_inert(o), *inert_in_external(o)) for name in names.split()}


def _inert(o: Options) -> Iterator[tuple[str, str]]:
    yield from inert_in_algorithm(o)
    yield from inert_in_distillation(o)
    yield from inert_in_loop(o)
    yield from inert_in_weights(o)
    if o.learns_labels:
        yield (
            "rollout_function_path rollout_sample_hook_path custom_reward_post_process_path "
            "rollout_data_postprocess_path",
            f"--loss-type {o.loss_type} grades nothing",
        )
        yield "max_logprob_diff", f"--loss-type {o.loss_type} learns what the prompt file holds"
    if o.loss_type != "dpo_loss":
        yield "rejected_key", f"--loss-type is {o.loss_type}"
    if not o.needs_engines and not o.trains_only:
        yield _OF_ENGINES, _NO_ENGINE
        if o.rollout_num_gpus:  # 0 may well be said
            yield "rollout_num_gpus", _NO_ENGINE
    if not o.apply_chat_template:
        yield "apply_chat_template_kwargs tool_key eval_tool_key", "--apply-chat-template is not given"
    if o.custom_rm_path is None:
        yield "group_rm", "--custom-rm-path is not given"
    if o.custom_generate_function_path is None:
        yield (
            "custom_generate_num_workers custom_generate_timeout custom_generate_max_failed",
            "--custom-generate-function-path is not given",
        )
    if o.eval_interval is None:
        yield (
            "eval_prompt_data eval_config eval_input_key eval_label_key eval_tool_key eval_reward_key "
            "n_samples_per_eval_prompt "
            "eval_temperature eval_top_p eval_top_k eval_min_p eval_max_response_len eval_max_prompt_len "
            "eval_max_context_len "
            "eval_min_new_tokens skip_eval_before_train log_passrate custom_eval_rollout_log_function_path "
            "eval_function_path",
            "--eval-interval is not given",
        )
    if o.learns_labels:
        yield (
            "over_sampling_batch_size dynamic_sampling_filter_path partial_rollout mask_offpolicy_in_partial_rollout "
            "buffer_filter_path",
            f"--loss-type {o.loss_type} learns what the prompt file holds",
        )
    elif not o.leaves_groups_over:
        yield (
            "partial_rollout",
            "no group is left over without --dynamic-sampling-filter-path or an --over-sampling-batch-size above "
            "--rollout-batch-size",
        )
    if not o.partial_rollout:
        yield "mask_offpolicy_in_partial_rollout buffer_filter_path", "--partial-rollout is not given"
    if o.debug_rollout_only:
        yield "save_token_data", "--debug-rollout-only trains nothing"
    yield from inert_in_sharing(o)
    yield from _inert_beside_own(o)
    yield from _inert_in_training(o)


def _inert_beside_own(o: Options) -> Iterator[tuple[str, str]]:
    if not any(paths_of(o, name) for name in POINTS):
        yield "custom custom_config_path", "there is no own function that could read them"
    if o.rollout_function_path is not None:
        yield (
            "over_sampling_batch_size dynamic_sampling_filter_path partial_rollout mask_offpolicy_in_partial_rollout "
            "buffer_filter_path",
            "--rollout-function-path makes the rollout",
        )
    if o.data_source_path is not None:
        yield "rollout_shuffle", "--data-source-path orders its prompts itself"
    if o.only_evaluates:
        yield "data_source_path", "--num-rollout 0 trains nothing"
    if o.load_debug_rollout_data is not None:
        yield "data_source_path", "--load-debug-rollout-data has the samples"


def _inert_in_training(o: Options) -> Iterator[tuple[str, str]]:
    if o.use_dynamic_batch_size:
        yield "micro_batch_size", "--use-dynamic-batch-size packs up to --max-tokens-per-gpu"
    else:
        yield "max_tokens_per_gpu", "--use-dynamic-batch-size is not given"
    if o.num_rollout is not None:
        yield "num_epoch", "--num-rollout is given"
    if o.load is None:
        yield "ckpt_step", "--load is not given"
    if o.save_interval is None:
        yield "async_save", "--save-interval is not given, and the last save is waited for"
    if o.lr_decay_style == "constant":
        fraction = " lr_decay_iters" if o.lr_warmup_fraction is None and o.weight_decay_incr_style == "constant" else ""
        yield "min_lr" + fraction, "--lr-decay-style is constant"
    if o.lr_decay_style != "WSD":
        yield "lr_wsd_decay_style lr_wsd_decay_iters", "--lr-decay-style is not WSD"
    if not o.lr_warmup_iters and not o.lr_warmup_fraction:
        yield "lr_warmup_init", "neither --lr-warmup-iters nor --lr-warmup-fraction is given"
    if o.weight_decay_incr_style == "constant":
        yield "start_weight_decay end_weight_decay", "--weight-decay-incr-style is constant"
    else:
        yield "weight_decay", f"--weight-decay-incr-style is {o.weight_decay_incr_style}"
    if o.data_parallel_size == 1:
        yield "balance_data", "there is one data-parallel rank"
    if o.tensor_model_parallel_size == 1:
        yield "sequence_parallel", "--tensor-model-parallel-size is 1"
    if not o.rollout_shuffle and not o.needs_engines:
        yield "rollout_seed", "--rollout-shuffle is not given, and nothing is sampled"
