"""Llama 3, dense: grouped-query attention, SwiGLU, no biases; the rotary scaling of Llama 3.1 and later ("llama3")."""

from __future__ import annotations

from typing import Any

from hpcrl.models.family import Config, Family, refuse, require, rope
from hpcrl.models.shared import dense

#: what Megatron's rotary embedding has fixed; only the factor can be set
FIXED = {"low_freq_factor": [1, 1.0], "high_freq_factor": [4, 4.0], "original_max_position_embeddings": [8192]}


def transformer(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's TransformerConfig."""
    refuse(config, {"attention_bias": [False], "mlp_bias": [False]})
    return dense.settings(config, rope_types=("default", "llama3"))


def gpt(config: Config) -> dict[str, Any]:
    """config.json -> arguments of Megatron's GPTModel."""
    found = rope(config)
    if found["kind"] != "llama3":
        return dense.gpt(config)
    scaling = {"model_type": config["model_type"], **found["scaling"]}
    require(scaling, ("factor", *FIXED))
    refuse(scaling, FIXED)
    return dense.gpt(config) | {"rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}


FAMILY = Family(model_type="llama", transformer=transformer, gpt=gpt, rules=dense.RULES)
