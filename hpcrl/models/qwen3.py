"""Qwen3, dense: RMS norms on queries and keys of each head, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

from typing import Any

from hpcrl.models.family import Config, Family, refuse
from hpcrl.models.shared import dense


def transformer(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's TransformerConfig."""
    refuse(config, {"attention_bias": [False]})
    return dense.settings(config, needed=["head_dim"]) | {"qk_layernorm": True}


FAMILY = Family(model_type="qwen3", transformer=transformer, gpt=dense.gpt, rules=dense.RULES)
