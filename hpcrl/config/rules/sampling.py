"""What sampling, filling a rollout, and speculative decoding (--vllm-speculative-config) ask of a run: pure functions
of the options of `sections/sampling.py`, and of config.json.

vLLM draws from the policy's own distribution whatever was drafted, so that tokens and log-probs are those of a run
without it.  Invariants: engines' log-probs are ones that the trainer can compute as well; where no weight update brings
the layers that engines draft with, that is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcrl.config.options import OWN_LAYERS, Options, drafts_with_own_layers, drafts_with_weights
from hpcrl.config.passthrough import flag
from hpcrl.config.plugin_names import is_path
from hpcrl.config.plugin_points import POINTS, paths_of
from hpcrl.errors import UsageError
from hpcrl.utils.plugins import PluginFolder

#: each file with one of these functions is a built-in filter, named as the option's value
FILTERS = Path(__file__).parents[2] / "rollout" / "filters"
FILTER_FUNCTIONS = {"dynamic_sampling_filter_path": "keep", "buffer_filter_path": "choose"}
SPECULATION = "--vllm-speculative-config"
#: of config.json: how many those are
_LAYERS_BEHIND = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_NO_ENGINE = "the prompt file is learned, and without --eval-interval no engine is used"
#: settings of engines, and of what grades their answers
_OF_ENGINES = (
    "rollout_external_engine_addrs rollout_external_engine_keys rollout_num_gpus_per_engine engine_start_timeout "
    "rollout_health_check_timeout update_timeout request_timeout rollout_server_concurrency "
    "rollout_max_context_len rollout_temperature rollout_top_p rollout_top_k rollout_stop "
    "rollout_stop_token_ids rollout_skip_special_tokens rm_type custom_rm_path rm_url reward_key "
    "reward_cpu_limit reward_timeout reward_max_failed update_weight_buffer_size "
    "custom_generate_function_path weight_transfer update_weight_disk_dir "
    "check_weight_update_equal vllm custom_update_weight_post_write_path"
)
_OF_FILLING = (
    "over_sampling_batch_size dynamic_sampling_filter_path partial_rollout mask_offpolicy_in_partial_rollout "
    "buffer_filter_path"
)


def check_sampling(o: Options) -> None:
    """Raise UsageError for lengths that leave no room, and for log-probs that the trainer could not compute."""
    context = o.rollout_max_context_len
    prompt = o.rollout_max_prompt_len
    if context and prompt and prompt >= context:
        raise UsageError(
            f"--rollout-max-prompt-len {prompt} leaves no room for a response in --rollout-max-context-len {context}"
        )
    if o.truncated_sampling and o.rollout_temperature != 1:
        raise UsageError(
            f"--rollout-temperature {o.rollout_temperature:g} with --rollout-top-p or --rollout-top-k: "
            "an engine cannot return log-probs of the cut distribution at this temperature",
            "keep --rollout-temperature 1, or sample from all tokens",
        )


def check_filling(o: Options) -> None:
    """Raise UsageError for groups that could not fill a rollout, or an unknown filter."""
    if o.over_sampling_batch_size is not None and o.over_sampling_batch_size < o.rollout_batch_size:
        raise UsageError(
            f"--over-sampling-batch-size {o.over_sampling_batch_size} is less than --rollout-batch-size "
            f"{o.rollout_batch_size}",
            "raise it to at least that",
        )
    for name, function in FILTER_FUNCTIONS.items():
        value, built_in = getattr(o, name), PluginFolder(FILTERS, function)
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


def check_speculation(o: Options) -> None:
    """Raise UsageError for a setting that vLLM would refuse when the engines start, or at the first sample."""
    setting = o.vllm.get("speculative_config")
    if setting is None:
        return
    method, count = setting.get("method"), setting.get("num_speculative_tokens")
    if str(method).endswith(f"_{OWN_LAYERS}"):  # vLLM's older names, one for each model, which it replaces by this one
        raise UsageError(
            f'{SPECULATION}: "method": "{method}" is vLLM\'s older name of "{OWN_LAYERS}"',
            f'write "method": "{OWN_LAYERS}"',
        )
    if count is not None and (type(count) is not int or count < 1):
        raise UsageError(f"{SPECULATION}: num_speculative_tokens is {count!r}, expected a whole number >= 1")
    if method == OWN_LAYERS and count is None:
        raise UsageError(f"{SPECULATION} does not say how many tokens are drafted", 'give it "num_speculative_tokens"')


def layers_behind(config: Mapping[str, Any]) -> int:
    """Layers that a checkpoint has behind the model's last one, by its config.json; they predict further tokens."""
    return next((int(config[name]) for name in _LAYERS_BEHIND if config.get(name)), 0)


def check_draft_layers(o: Options, config: Mapping[str, Any]) -> None:
    """Raise UsageError if drafts are to come from layers that this model does not have."""
    setting = o.vllm.get("speculative_config") or {}
    if drafts_with_own_layers(setting, o.hf_checkpoint) and not layers_behind(config):
        raise UsageError(
            f'{SPECULATION} with "method": "{OWN_LAYERS}" (slime\'s --sglang-speculative-algorithm EAGLE): '
            "the model's config.json has no layers that predict further tokens (num_nextn_predict_layers)",
            "leave it out",
        )


def drafts_of_files(speculation: Mapping[str, Any], layers: int | None, checkpoint: str | None) -> Iterator[str]:
    """What is to be said where engines draft with weights that no weight update brings; nothing elsewhere.

    Args:
        speculation: the value of --vllm-speculative-config.
        layers: --mtp-num-layers.
        checkpoint: --hf-checkpoint.
    """
    if not drafts_with_own_layers(speculation, checkpoint):
        if drafts_with_weights(speculation):
            yield (
                f"{SPECULATION}: no weight update brings engines the weights that they draft with "
                f"({speculation.get('model') or speculation.get('method')}), so fewer drafts may be accepted as the "
                "policy moves"
            )
    elif not layers:
        yield (
            f"{SPECULATION}: no weight update brings engines the layers that they draft with, so fewer drafts may be "
            "accepted as the policy moves; with --mtp-num-layers 1, for a model whose layers hpcrl trains "
            "(docs/models.md), updates bring them, and --enable-mtp-training trains them"
        )


def inert_in_sampling(o: Options) -> Iterator[tuple[str, str]]:
    """Options of sampling and of custom functions without effect, several in one string -> why."""
    if o.learns_labels:
        yield (
            "rollout_function_path rollout_sample_hook_path custom_reward_post_process_path "
            "rollout_data_postprocess_path",
            f"--loss-type {o.loss_type} grades nothing",
        )
        yield "max_logprob_diff", f"--loss-type {o.loss_type} learns what the prompt file holds"
    if not o.needs_engines and not o.trains_only:
        yield _OF_ENGINES, _NO_ENGINE
        if o.rollout_num_gpus:  # 0 may well be said
            yield "rollout_num_gpus", _NO_ENGINE
    if not any(paths_of(o, name) for name in POINTS):
        yield "custom custom_config_path", "there is no custom function that could read them"
    yield from _inert_in_filling(o)


def _inert_in_filling(o: Options) -> Iterator[tuple[str, str]]:
    if o.learns_labels:
        yield _OF_FILLING, f"--loss-type {o.loss_type} learns what the prompt file holds"
    elif not o.leaves_groups_over:
        yield (
            "partial_rollout",
            "no group is left over without --dynamic-sampling-filter-path or an --over-sampling-batch-size above "
            "--rollout-batch-size",
        )
    if not o.partial_rollout:
        yield "mask_offpolicy_in_partial_rollout buffer_filter_path", "--partial-rollout is not given"
    if o.rollout_function_path is not None:
        yield _OF_FILLING, "--rollout-function-path makes the rollout"
