"""Qwen3, dense: RMS norms on queries and keys of each head, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

from typing import Any

from hpcrl.models.family import Config, Family, Rule, refuse, require, rope, tied


def transformer(config: Config) -> dict[str, Any]:
    """config.json -> fields of Megatron's TransformerConfig."""
    require(
        config, ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
    )
    implemented = {
        "attention_bias": [False],
        "use_sliding_window": [False],
        "hidden_act": ["silu"],
        "attention_dropout": [0, 0.0],
    }
    refuse(config, implemented)
    refuse({"model_type": "qwen3", "rope_type": rope(config)["kind"]}, {"rope_type": ["default"]})
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
        "qk_layernorm": True,
        "rotary_interleaved": False,
    }


def gpt(config: Config) -> dict[str, Any]:
    """config.json -> arguments of Megatron's GPTModel."""
    return {
        "position_embedding_type": "rope",
        "rotary_base": rope(config)["theta"],
        "rotary_percent": 1.0,
        "share_embeddings_and_output_weights": tied(config),
    }


M, H = "decoder.layers.{layer}.", "model.layers.{layer}."

FAMILY = Family(
    model_type="qwen3",
    transformer=transformer,
    gpt=gpt,
    rules=(
        Rule("embedding.word_embeddings.weight", "vocab", ("model.embed_tokens.weight",)),
        Rule(M + "input_layernorm.weight", "same", (H + "input_layernorm.weight",)),
        Rule(M + "self_attention.linear_qkv.layer_norm_weight", "same", (H + "input_layernorm.weight",)),  # Transformer Engine
        Rule(M + "self_attention.linear_qkv.weight", "qkv", tuple(f"{H}self_attn.{x}_proj.weight" for x in "qkv")),
        Rule(M + "self_attention.q_layernorm.weight", "same", (H + "self_attn.q_norm.weight",)),
        Rule(M + "self_attention.k_layernorm.weight", "same", (H + "self_attn.k_norm.weight",)),
        Rule(M + "self_attention.linear_proj.weight", "row", (H + "self_attn.o_proj.weight",)),
        Rule(M + "pre_mlp_layernorm.weight", "same", (H + "post_attention_layernorm.weight",)),
        Rule(M + "mlp.linear_fc1.layer_norm_weight", "same", (H + "post_attention_layernorm.weight",)),  # Transformer Engine
        Rule(M + "mlp.linear_fc1.weight", "gate_up", (H + "mlp.gate_proj.weight", H + "mlp.up_proj.weight")),
        Rule(M + "mlp.linear_fc2.weight", "row", (H + "mlp.down_proj.weight",)),
        Rule("decoder.final_layernorm.weight", "same", ("model.norm.weight",)),
        Rule("output_layer.weight", "vocab", ("lm_head.weight",)),
    ),
)
