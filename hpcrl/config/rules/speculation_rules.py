"""Speculative decoding in the engines (--vllm-speculative-config): what it asks of a run, before anything starts.

vLLM draws from the policy's own distribution whatever was drafted, so that tokens and log-probs are those of a run
without it.
Invariant: pure functions of the setting, of config.json and the options; no weight update brings a draft its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpcrl.errors import UsageError

if TYPE_CHECKING:
    from hpcrl.config.options import Options

FLAG = "--vllm-speculative-config"
#: vLLM's methods that draft from the text itself, without a model
_OF_TEXT = ("ngram", "ngram_gpu", "suffix")
OWN_LAYERS = "mtp"  #: the method that drafts with the layers which a checkpoint has behind the model's last one
_LAYERS_BEHIND = ("num_nextn_predict_layers", "num_mtp_layers")  #: of config.json: how many those are


def drafts_with_weights(setting: Mapping[str, Any] | None) -> bool:
    """Whether drafts come from a model, whose weights an engine must keep."""
    return bool(setting) and setting.get("method") not in _OF_TEXT


def check_speculation(o: Options) -> None:
    """UsageError for a setting that vLLM would refuse when the engines start, or at the first sample."""
    setting = o.vllm.get("speculative_config")
    if setting is None:
        return
    count = setting.get("num_speculative_tokens")
    if count is not None and (type(count) is not int or count < 1):
        raise UsageError(f"{FLAG}: num_speculative_tokens is {count!r}, expected a whole number >= 1")
    if setting.get("method") == OWN_LAYERS and count is None:
        raise UsageError(f"{FLAG} does not say how many tokens are drafted", 'give it "num_speculative_tokens"')
    for name in ("rollout_min_p", "eval_min_p"):
        if value := getattr(o, name):
            raise UsageError(
                f"--{name.replace('_', '-')} {value:g} and {FLAG} exclude each other: vLLM checks no draft against "
                "min-p",
                "leave one of them out",
            )


def layers_behind(config: Mapping[str, Any]) -> int:
    """Layers that a checkpoint has behind the model's last one, by its config.json; they predict further tokens."""
    return next((int(config[name]) for name in _LAYERS_BEHIND if config.get(name)), 0)


def check_draft_layers(o: Options, config: Mapping[str, Any]) -> None:
    """UsageError if drafts are to come from layers that this model does not have."""
    setting = o.vllm.get("speculative_config") or {}
    if setting.get("method") == OWN_LAYERS and "model" not in setting and not layers_behind(config):
        raise UsageError(
            f'{FLAG} with "method": "{OWN_LAYERS}" (slime\'s --sglang-speculative-algorithm EAGLE): the model\'s '
            "config.json has no"
            " layers that predict further tokens (num_nextn_predict_layers)",
            "leave it out",
        )
