"""Qwen2 and Qwen2.5, dense: biases on queries, keys and values, grouped-query attention, SwiGLU, no norms of single
heads."""

from __future__ import annotations

from typing import Any

from hpcrl.models.family import Config, Family
from hpcrl.models.shared import dense


def transformer(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's TransformerConfig."""
    return dense.settings(config) | {"add_qkv_bias": True}


FAMILY = Family(model_type="qwen2", transformer=transformer, gpt=dense.gpt, rules=dense.RULES)
