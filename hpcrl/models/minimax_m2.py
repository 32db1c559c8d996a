"""MiniMax-M2 and M2.5: a norm over all heads of queries and of keys, a part of a head rotated, experts in every layer,
chosen by sigmoid scores with a correction bias, without a shared one.

Published config.json says with `rotary_dim` how many columns are rotated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpcrl.models.family import Config, Family, Rule, refuse, require
from hpcrl.models.shared import dense, moe
from hpcrl.models.shared.dense import H, M

# without the first two vLLM chooses experts otherwise than transformers
NEEDED = ("scoring_func", "use_routing_bias", "rotary_dim", "head_dim", "num_local_experts", "num_experts_per_tok")
#: layers for further tokens, which are not made, and names that the files have of other models of the same makers
KNOWS = (
    *("attn_type_list", "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
    *("mtp_transformer_layers", "num_mtp_modules", "qk_norm_type", "rotary_dim", "shared_intermediate_size"),
    *("shared_moe_mode", "use_mtp", "use_routing_bias"),
)
BLOCK = H + "block_sparse_moe."


def transformer(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's TransformerConfig."""
    fields = dense.settings(config, needed=NEEDED)
    refuse(
        config,
        {
            "scoring_func": ["sigmoid"],
            "use_routing_bias": [True],
            "use_qk_norm": [True],
            "qk_norm_type": ["per_layer"],
            "attention_bias": [False],
            "sliding_window": [None],
            "shared_intermediate_size": [0],
            "router_jitter_noise": [0, 0.0],
        },
    )
    sizes = {**config, "moe_intermediate_size": config["intermediate_size"]}
    return (
        fields
        | moe.settings(sizes, config["num_local_experts"], [True] * config["num_hidden_layers"])
        | {
            "qk_layernorm": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": True,  # unread with sigmoid; slime's flags for the model say so
            "moe_router_enable_expert_bias": True,
        }
    )


def gpt(config: Config) -> dict[str, Any]:
    """config.json -> arguments of Megatron's GPTModel."""
    require(config, NEEDED)
    return dense.gpt(config, share=config["rotary_dim"] / config["head_dim"])


def adapt(spec: Any, norm: type, config: Any) -> None:
    """Put the norms over all heads into a layer's spec."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from hpcrl.models.shared._wide_norm import NormOverHeads

    attention = spec.submodules.self_attention.submodules
    attention.q_layernorm = ModuleSpec(module=NormOverHeads, params={"heads": config.num_attention_heads})
    attention.k_layernorm = ModuleSpec(module=NormOverHeads, params={"heads": config.num_query_groups})


def over_heads(rule: Rule) -> Rule:
    """The rule; of a norm of queries or keys, as one over all heads."""
    return replace(rule, kind="over_heads") if rule.needs == "qk_layernorm" else rule


FAMILY = Family(
    model_type="minimax_m2",
    transformer=transformer,
    gpt=gpt,
    rules=(
        *map(over_heads, dense.RULES),
        Rule(M + "mlp.router.weight", "same", (BLOCK + "gate.weight",), layers="experts"),
        Rule(M + "mlp.router.expert_bias", "same", (BLOCK + "e_score_correction_bias",), layers="experts"),
        *moe.experts(BLOCK, ("w1", "w3", "w2")),
    ),
    adapt=adapt,
    knows=KNOWS,
    specs=tuple(
        (f"{plugins}.models.minimax_m2", "get_minimax_m2_layer_spec") for plugins in ("slime_plugins", "vime_plugins")
    ),
)
