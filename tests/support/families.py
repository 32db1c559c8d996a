"""Two sizes of a tiny random model of every family, one of them with odd numbers.

make(directory, "glm4_moe", odd=True) -> directory
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import make_family

#: of every family: a plain size, and one with odd numbers: vocabulary not divisible by TP, heads no power of two
PLAIN = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ODD = {
    "vocab_size": 131,
    "hidden_size": 60,
    "intermediate_size": 90,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GLM_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}

DELTA_NET = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
#: three value heads for each key head, the delta net above attention
ODD_DELTA_NET = {
    "head_dim": 24,
    "layer_types": ["full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
}
GATED_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}

#: model_type -> fields of the plain and of the odd model
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2": (
        {"tied": True},
        {"tied": False},
    ),
    "qwen3": (
        {"tied": True, "head_dim": 32},
        {"tied": False, "head_dim": 14},
    ),
    "llama": (
        {"tied": True, "max_position_embeddings": 16384, "rope_parameters": LLAMA3},
        {"tied": False, "head_dim": 14},
    ),
    "glm4": (
        {"tied": False, "head_dim": 16, "attention_bias": True, "rope_parameters": GLM_ROPE},
        {"tied": True, "head_dim": 20, "attention_bias": False, "rope_parameters": GLM_ROPE},
    ),
    "qwen3_moe": (
        {
            "tied": False,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        {
            "tied": True,
            "head_dim": 14,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 22,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_next": (
        {
            "tied": False,
            **DELTA_NET,
            **GATED_EXPERTS,
            "norm_topk_prob": True,
        },
        {
            "tied": True,
            **ODD_DELTA_NET,
            **GATED_EXPERTS,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5_text": (
        {"tied": True, **DELTA_NET},
        {"tied": False, **ODD_DELTA_NET},
    ),
    "qwen3_5_moe_text": (
        {"tied": True, **DELTA_NET, **GATED_EXPERTS},
        {"tied": False, **ODD_DELTA_NET, **GATED_EXPERTS},
    ),
    "glm4_moe": (
        {
            "tied": False,
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": False,
            "n_group": 1,
            "rope_parameters": GLM_ROPE,
        },
        {
            "tied": True,
            "head_dim": 20,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 22,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "attention_bias": False,
            "use_qk_norm": True,
            "rope_parameters": GLM_ROPE,
        },
    ),
    "deepseek_v3": (
        {
            "tied": False,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        {
            "tied": False,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "num_key_value_heads": 6,
            "q_lora_rank": 22,
            "kv_lora_rank": 18,
            "qk_nope_head_dim": 14,
            "qk_rope_head_dim": 12,
            "v_head_dim": 10,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 22,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "rope_parameters": YARN,
        },
    ),
    "minimax_m2": (
        {
            "tied": False,
            "head_dim": 16,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "rotary_dim": 8,
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {
            "tied": True,
            "head_dim": 20,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "rotary_dim": 12,
            "num_key_value_heads": 1,  # fewer than tensor-parallel ranks
            "intermediate_size": 22,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
        },
    ),
    "glm4_moe_lite": (
        {
            "tied": False,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,  # what transformers has in the two inner norms whatever the config says
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
        },
        {
            "tied": True,
            "num_key_value_heads": 6,
            "rms_norm_eps": 1e-6,
            "q_lora_rank": None,
            "kv_lora_rank": 22,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 14,
            "v_head_dim": 26,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 22,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
        },
    ),
}
EXPERTS = ("qwen3_moe", "glm4_moe", "deepseek_v3", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text", "minimax_m2")
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
#: a family -> another whose layers are built of the same parts
ALIKE = {"qwen2": "qwen3", "llama": "qwen3", "glm4_moe_lite": "deepseek_v3"}
ALIKE |= {"qwen3_5_text": "qwen3_next", "qwen3_5_moe_text": "qwen3_next"}


def one_of_each_kind(names: Iterable[str]) -> list[Any]:
    """Names of cases, as parameters of what takes long for each: of families alike, all but one are for `make soak`."""
    return [pytest.param(name, marks=pytest.mark.soak if name in ALIKE else ()) for name in names]


def make(directory: str | Path, model_type: str, odd: bool = False, **more: Any) -> Path:
    """Save a random model, and a tokenizer, in `directory`; returns it.  more: fields of the config that replace those
    above."""
    fields = {**(ODD if odd else PLAIN), **SIZES[model_type][odd], **more}
    if "kv_lora_rank" in fields:  # every head has keys and values of its own
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    return make_family(directory, model_type, **fields)


def apart(tensors: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """transformers' tensors of all experts together, cut into the single ones that files hold; others as they are.

    like: tensors of the file, by name.
    """
    found = {}
    mixtral = any(".block_sparse_moe." in name for name in like)  # MiniMax-M2's names are Mixtral's
    for name, tensor in tensors.items():
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if ".experts." not in name:
            found[name] = tensor
            continue
        layer, fused = name.rsplit(".", 1)
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        names = (gate, up) if fused == "gate_up_proj" else (down,)
        for expert, rows in enumerate(tensor):
            found |= {f"{layer}.{expert}.{n}.weight": x for n, x in zip(names, rows.chunk(len(names)), strict=True)}
    return {name: found[name] for name in found if name in like}
