"""What the dense families share: settings of a decoder with rotary embedding, RMS norms and SwiGLU, and its tensors'
names.

Invariant: `settings` refuses whatever of the common settings of config.json it does not carry over to Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcrl.models.family import Config, Rule, refuse, require, rope, tied

#: of every config.json
NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
M = "decoder.layers.{layer}."
H = "model.layers.{layer}."


def settings(config: Config, *, needed: Sequence[str] = (), rope_types: Sequence[str] = ("default",)) -> dict[str, Any]:
    """config.json -> fields of TransformerConfig of a plain decoder; families change what is different.

    Args:
        needed: settings that must be there in addition to NEEDED.
        rope_types: kinds of rotary scaling that the family implements.

    Raises:
        DataError: if something is missing, or not implemented.
    """
    require(config, (*NEEDED, *needed))
    wanted = {
        "use_sliding_window": [False],
        "hidden_act": ["silu"],
        "attention_dropout": [0, 0.0, None],
        "layer_types": [None, ["full_attention"] * config["num_hidden_layers"]],
    }
    refuse(config, wanted)
    refuse({"model_type": config["model_type"], "rope_type": rope(config)["kind"]}, {"rope_type": rope_types})
    heads = config["num_attention_heads"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "activation_func": "silu",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "rotary_interleaved": False,
    }


def gpt(config: Config, share: float = 1.0) -> dict[str, Any]:
    """config.json -> arguments of Megatron's GPTModel.

    Args:
        share: see `family.rope`.
    """
    found = rope(config, share)
    return {
        "position_embedding_type": "rope",
        "rotary_base": found["theta"],
        "rotary_percent": found["share"],
        "share_embeddings_and_output_weights": tied(config),
    }


# ---- names.  Those with layer_norm_weight are Transformer Engine's, which puts a norm into the layer that follows it.

EMBEDDINGS = (
    Rule("embedding.word_embeddings.weight", "vocab", ("model.embed_tokens.weight",)),
    Rule("decoder.final_layernorm.weight", "same", ("model.norm.weight",)),
    Rule("output_layer.weight", "vocab", ("lm_head.weight",)),
)
ATTENTION = (
    Rule(M + "input_layernorm.weight", "same", (H + "input_layernorm.weight",)),
    Rule(M + "self_attention.linear_qkv.layer_norm_weight", "same", (H + "input_layernorm.weight",)),
    Rule(M + "self_attention.linear_qkv.weight", "qkv", tuple(f"{H}self_attn.{x}_proj.weight" for x in "qkv")),
    Rule(
        M + "self_attention.linear_qkv.bias",
        "qkv",
        tuple(f"{H}self_attn.{x}_proj.bias" for x in "qkv"),
        needs="add_qkv_bias",
    ),
    Rule(M + "self_attention.q_layernorm.weight", "same", (H + "self_attn.q_norm.weight",), needs="qk_layernorm"),
    Rule(M + "self_attention.k_layernorm.weight", "same", (H + "self_attn.k_norm.weight",), needs="qk_layernorm"),
    Rule(M + "self_attention.linear_proj.weight", "row", (H + "self_attn.o_proj.weight",)),
    Rule(M + "pre_mlp_layernorm.weight", "same", (H + "post_attention_layernorm.weight",)),
)
FUSED_NORM = Rule(
    M + "mlp.linear_fc1.layer_norm_weight", "same", (H + "post_attention_layernorm.weight",), layers="dense"
)
DOWN = Rule(M + "mlp.linear_fc2.weight", "row", (H + "mlp.down_proj.weight",), layers="dense")
MLP = (
    FUSED_NORM,
    Rule(
        M + "mlp.linear_fc1.weight", "gate_up", (H + "mlp.gate_proj.weight", H + "mlp.up_proj.weight"), layers="dense"
    ),
    DOWN,
)

RULES = EMBEDDINGS + ATTENTION + MLP
