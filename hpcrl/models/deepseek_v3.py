"""DeepSeek-V3 and R1, Moonlight: multi-head latent attention, first layers dense, sigmoid routing with a correction
bias, groups of experts and shared experts.
"""

from __future__ import annotations

from typing import Any

from hpcrl.models.family import Config, Family, refuse, require
from hpcrl.models.shared import mla, mtp


def transformer(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's MLATransformerConfig."""
    # transformers and Megatron take the choice of experts for granted; without the two names vLLM chooses otherwise
    require(config, ("num_hidden_layers", "first_k_dense_replace", "scoring_func", "topk_method"))
    refuse(config, {"moe_layer_freq": [1]})
    return mla.settings(
        config, [layer >= config["first_k_dense_replace"] for layer in range(config["num_hidden_layers"])]
    )


FAMILY = Family(
    model_type="deepseek_v3", transformer=transformer, gpt=mla.gpt, rules=mla.RULES, heads=mla.HEADS, copies=mtp.COPIES
)
