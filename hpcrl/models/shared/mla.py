"""What the families with multi-head latent attention share: Megatron's settings of it, and its tensors' names.

Keys and values come from one vector a token (`kv_lora_rank`), queries from another or straight from the hidden state;
part of a head is rotated, and that part of the keys is one for all heads (DeepSeek-V2, arXiv:2405.04434).

Invariant: what Megatron's attention leaves unread (kv_channels, biases) is refused or fixed here, so that no setting of
config.json is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcrl.models.family import Config, Rule, refuse, require, rope
from hpcrl.models.shared import dense, moe, mtp
from hpcrl.models.shared.dense import H, M

NEEDED = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", *moe.SIGMOID)
YARN = ("factor", "original_max_position_embeddings")


def settings(config: Config, sparse: Sequence[bool]) -> dict[str, Any]:
    """config.json -> fields of MLATransformerConfig.

    Args:
        sparse: of every layer whether it has experts.

    Raises:
        DataError: if something is missing, or not implemented.
    """
    fields = dense.settings(config, needed=NEEDED, rope_types=("default", "yarn"))
    heads = config["num_attention_heads"]
    refuse(
        config,
        {
            "attention_bias": [False],
            "rope_interleave": [True, None],
            "num_key_value_heads": [heads, None],
            "partial_rotary_factor": [1, 1.0, None],
            "scoring_func": ["sigmoid"],
            "topk_method": ["noaux_tc"],
        },
    )
    return (
        fields
        | moe.sigmoid_settings(config, sparse)
        | {
            "multi_latent_attention": True,
            "q_lora_rank": config.get("q_lora_rank"),
            "kv_lora_rank": config["kv_lora_rank"],
            "qk_head_dim": config["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
            "v_head_dim": config["v_head_dim"],
            "num_query_groups": heads,
            "kv_channels": config["v_head_dim"],  # Megatron reads the sizes above
            "qk_layernorm": True,  # of the two vectors
        }
        | _rotation(config)
    )


def _rotation(config: Config) -> dict[str, Any]:
    """Of the rotated columns; without YaRN a factor of 1, with which the two scales say nothing.

    transformers scales cos and sin by m(mscale) / m(mscale_all_dim), or by m(1) if one of them is missing or 0, and
    scores by m(mscale_all_dim)^2, where m(x) = 0.1 x log(factor) + 1; Megatron does so without the "if".  vLLM takes a
    missing mscale for 1 and a missing mscale_all_dim for 0, without the "if" too: where they differ, it is refused.
    """
    found = rope(config)
    plain = {"rope_type": "rope", "rotary_base": found["theta"], "rotary_percent": 1.0, "rotary_scaling_factor": 1.0}
    if found["kind"] != "yarn":
        return plain | {"mscale": 1.0, "mscale_all_dim": 1.0}
    scaling = {"model_type": config["model_type"], **found["scaling"]}
    require(scaling, YARN)
    scale = scaling.get("mscale")
    all_dim = scaling.get("mscale_all_dim")
    refuse(
        scaling,
        {
            "attention_factor": [None],
            "truncate": [True, None],
            "partial_rotary_factor": [1, 1.0, None],
            "mscale": [scale] if all_dim else [1, 1.0, None],
            "mscale_all_dim": [all_dim] if scale else [0, 0.0, None],
        },
    )
    return plain | {
        "rope_type": "yarn",
        "rotary_scaling_factor": float(scaling["factor"]),
        "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "beta_fast": float(scaling.get("beta_fast") or 32),
        "beta_slow": float(scaling.get("beta_slow") or 1),
        "mscale": float(scale or 1.0),
        "mscale_all_dim": float(all_dim or 0.0),
    }


def gpt(config: Config) -> dict[str, Any]:
    """config.json -> arguments of Megatron's GPTModel, which leaves the rotation to each layer's attention."""
    return dense.gpt(config) | {"rope_scaling_factor": _rotation(config)["rotary_scaling_factor"]}


# ---- names.  Those with layer_norm_weight are Transformer Engine's, which puts a norm into the layer that follows it.

A = M + "self_attention."
S = H + "self_attn."
ATTENTION = (
    Rule(M + "input_layernorm.weight", "same", (H + "input_layernorm.weight",)),
    Rule(A + "linear_q_proj.weight", "column", (S + "q_proj.weight",), needs="!q_lora_rank"),
    Rule(A + "linear_q_down_proj.weight", "same", (S + "q_a_proj.weight",), needs="q_lora_rank"),
    Rule(A + "q_layernorm.weight", "same", (S + "q_a_layernorm.weight",), needs="q_lora_rank"),
    Rule(A + "linear_q_up_proj.layer_norm_weight", "same", (S + "q_a_layernorm.weight",), needs="q_lora_rank"),
    Rule(A + "linear_q_up_proj.weight", "column", (S + "q_b_proj.weight",), needs="q_lora_rank"),
    Rule(A + "linear_kv_down_proj.weight", "same", (S + "kv_a_proj_with_mqa.weight",)),
    Rule(A + "kv_layernorm.weight", "same", (S + "kv_a_layernorm.weight",)),
    Rule(A + "linear_kv_up_proj.layer_norm_weight", "same", (S + "kv_a_layernorm.weight",)),
    Rule(A + "linear_kv_up_proj.weight", "column", (S + "kv_b_proj.weight",)),
    Rule(A + "linear_proj.weight", "row", (S + "o_proj.weight",)),
    Rule(M + "pre_mlp_layernorm.weight", "same", (H + "post_attention_layernorm.weight",)),
)
RULES = (*dense.EMBEDDINGS, *ATTENTION, *dense.MLP, *moe.SIGMOID_RULES)
HEADS = mtp.heads(RULES, "experts", mtp.BEHIND, mtp.OWN)  #: of the layer behind the last one
