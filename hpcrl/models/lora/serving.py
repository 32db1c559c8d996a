"""Whether engines get an adapter alone, or the weights with it added in.

vLLM multiplies by A and B next to a layer's matrix where it has a layer for that.  Where it has none it would leave the
adapter out without a word, so what it can do is listed here, as far as it was seen.

Invariants: trainer and engines ask the same function; what an engine holds of an adapter is compared with what it
should hold before it serves anything (`hpcrl/engine/params/adapter_slot.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.models.family import Config, Family, find_family
from hpcrl.models.files.config_json import read_config
from hpcrl.models.lora.settings import LoraSettings, lora_settings

ENVIRONMENT = "HPCRL_LORA"  #: of an engine: the adapter's settings, as JSON
NAME, NUMBER = "adapter-0", 1  #: what vLLM calls the adapter, and its number of it
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  #: what --max-lora-rank of vLLM may be
Serve = Literal["adapter", "merged"]


def served_as(options: Options, family: Family, config: Config) -> Serve | None:
    """What an update brings; None for a run that trains all weights.

    Raises:
        UsageError: if --lora-serve adapter is given where it cannot be.
    """
    settings = lora_settings(options)
    if settings is None:
        return None
    why = obstacle(options, settings, family, config)
    if options.lora_serve == "adapter" and why:
        raise UsageError(f"--lora-serve adapter: {why}", "give --lora-serve merged, or leave it out")
    return options.lora_serve or ("merged" if why else "adapter")


def serves_adapter(options: Options) -> bool:
    """Whether an update brings the adapter alone.

    Raises:
        UsageError, DataError: as `served_as`, and for a bad config.json.
    """
    if not options.lora_rank:
        return False
    config = read_config(str(options.hf_checkpoint))
    return served_as(options, find_family(config, str(options.hf_checkpoint)), config) == "adapter"


def obstacle(options: Options, settings: LoraSettings, family: Family, config: Config) -> str:
    """Why engines cannot have the adapter alone; "" if they can."""
    fields = family.transformer(config)
    if fields.get("num_moe_experts"):  # vLLM then has other layers for all of them, whether they have an adapter or not
        return "engines were not seen to apply adapters next to experts"
    if fields.get("multi_latent_attention"):
        return "vLLM absorbs matrices of multi-head latent attention, past their adapters"
    if fields.get("linear_attention_freq"):
        return "engines were not seen to apply adapters of gated delta nets"
    if options.rollout_external_engine_addrs:
        return "engines of another job were started without room for it"
    if settings.rank > RANKS[-1]:
        return f"vLLM takes ranks up to {RANKS[-1]}"
    if options.mtp_num_layers or options.vllm.get("speculative_config"):
        return "drafts would be of the model without its adapter"
    return ""


def engine_flags(options: Options) -> dict[str, Any]:
    """vLLM's arguments for an engine that gets the adapter alone."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(rank for rank in RANKS if rank >= options.lora_rank),
    }


def to_environment(options: Options) -> dict[str, str]:
    """What tells its processes."""
    settings = lora_settings(options)
    assert settings is not None
    return {ENVIRONMENT: json.dumps(asdict(settings))}


def of_environment(environment: Mapping[str, str]) -> LoraSettings | None:
    """What `to_environment` told."""
    text = environment.get(ENVIRONMENT)
    return None if text is None else LoraSettings.of_plain(json.loads(text))
