"""GLM-4.5 and later with experts: first layers dense, sigmoid routing with a correction bias, a shared expert.

Half of a head's columns are rotated; norms on queries and keys, and biases, as config.json says.
"""

from __future__ import annotations

from typing import Any

from hpcrl.models.family import Config, Family
from hpcrl.models.shared import dense, moe, mtp

NEEDED = (*moe.SIGMOID, "first_k_dense_replace", "attention_bias")


def transformer(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's TransformerConfig."""
    fields = dense.settings(config, needed=NEEDED)
    sparse = [layer >= config["first_k_dense_replace"] for layer in range(config["num_hidden_layers"])]
    return (
        fields
        | moe.sigmoid_settings(config, sparse)
        | {"add_qkv_bias": config["attention_bias"], "qk_layernorm": bool(config.get("use_qk_norm", False))}
    )


def gpt(config: Config) -> dict[str, Any]:
    """config.json -> arguments of Megatron's GPTModel."""
    return dense.gpt(config, share=0.5)


RULES = (*dense.RULES, *moe.SIGMOID_RULES)

FAMILY = Family(
    model_type="glm4_moe",
    transformer=transformer,
    gpt=gpt,
    rules=RULES,
    heads=mtp.heads(RULES, "experts", mtp.BEHIND, mtp.OWN),
    copies=mtp.COPIES,
)
