"""Which settings of Megatron-core's need CUDA and which packages beside it; data, for the trainer and for whoever looks
before it starts.

Invariant: nothing is imported here, torch least of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: what a setting may need besides CUDA -> the packages of which one must be installed
PARTS: dict[str, tuple[str, ...]] = {
    "Transformer Engine": ("transformer_engine",),
    "flash-attn or Transformer Engine": ("flash_attn", "transformer_engine"),
    "DeepEP": ("deep_ep",),
    "Apex": ("apex",),
}

_CUDA = """
fp8 fp4 nccl_ub optimizer_cpu_offload overlap_p2p_comm_warmup_flush
pad_buckets_for_high_nccl_busbw use_fused_weighted_squared_relu
"""
_ENGINE = """
apply_query_key_layer_scaling apply_rope_fusion batch_invariant_mode cpu_offloading fine_grained_activation_offloading fp8_param
fp4_param fused_single_qkv_rope log_max_attention_logit memory_efficient_layer_norm moe_grouped_gemm moe_permute_fusion moe_router_fusion qk_clip
use_precision_aware_optimizer use_te_activation_func use_te_rng_tracker
"""
#: a setting that is on -> the part that it needs ("" is CUDA alone)
NEEDS: dict[str, str] = (
    dict.fromkeys(_CUDA.split(), "")
    | dict.fromkeys(_ENGINE.split(), "Transformer Engine")
    | {
        "gradient_accumulation_fusion": "Apex",  # the output layer is Megatron's own, whatever the others are
        "moe_enable_deepep": "DeepEP",
        "persist_layer_norm": "Transformer Engine",
    }
)
#: a setting with this value -> the part that it needs
VALUE_NEEDS: dict[tuple[str, Any], str] = {
    ("attention_backend", "flash"): "flash-attn or Transformer Engine",
    ("attention_backend", "fused"): "Transformer Engine",
    ("attention_backend", "unfused"): "Transformer Engine",
    ("attention_softmax_in_fp32", False): "Transformer Engine",  # ours always is in fp32
    ("cp_comm_type", "a2a"): "Transformer Engine",
    ("cp_comm_type", "p2p"): "Transformer Engine",
    ("moe_token_dispatcher_type", "flex"): "DeepEP",
    ("transformer_impl", "transformer_engine"): "Transformer Engine",
}


def settings_with_parts(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(field, value, part) of every setting that needs a part of PARTS; values as a recipe has them."""
    for name, value in settings.items():
        part = (NEEDS.get(name) if value else None) or (
            VALUE_NEEDS.get((name, value)) if isinstance(value, (str, bool)) else None
        )
        if part:
            yield name, value, part
