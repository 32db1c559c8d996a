"""Qwen3 with experts: Qwen3's attention, softmax routing, layers with experts by a period and a list of exceptions."""

from __future__ import annotations

from typing import Any

from hpcrl.models.family import Config, Family, refuse, require
from hpcrl.models.shared import dense, moe

NEEDED = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")


def transformer(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's TransformerConfig."""
    config = {"num_experts": config.get("num_local_experts"), **config}  # the name that transformers 5 writes
    require(config, ["num_experts"])
    refuse(config, {"attention_bias": [False]})
    fields = dense.settings(config, needed=NEEDED) | {"qk_layernorm": True}
    return (
        fields
        | moe.settings(config, config["num_experts"], layers_with_experts(config))
        | {
            "moe_router_score_function": "softmax",
            # softmax over the chosen experts alone is softmax over all, divided by the sum of the chosen
            "moe_router_pre_softmax": not config["norm_topk_prob"],
        }
    )


def layers_with_experts(config: Config) -> list[bool]:
    """Of each layer, whether it has experts: those of a period, without a list of exceptions."""
    period = config.get("decoder_sparse_step", 1)
    plain = config.get("mlp_only_layers") or []
    return [layer not in plain and (layer + 1) % period == 0 for layer in range(config["num_hidden_layers"])]


FAMILY = Family(
    model_type="qwen3_moe",
    transformer=transformer,
    gpt=dense.gpt,
    rules=(*dense.RULES, moe.ROUTER, *moe.EXPERTS),
)
