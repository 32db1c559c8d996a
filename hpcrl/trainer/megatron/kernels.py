"""Which fused kernels Megatron-core has found in Transformer Engine and Apex, as these are installed.

What counts is the function that a layer would call, and the arguments that it takes: not the number of a release, since
Megatron-core, Transformer Engine and Apex come in any combination.  Invariant: a kernel that is found can be called by
the layers of the installed Megatron-core.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

ROPE = "rotary embedding"  #: of packed sequences, which rotates the two halves of a head
INTERLEAVED = "interleaved rotary embedding"  #: of packed sequences, which can rotate neighbouring columns too
PERMUTE = "permutation of tokens"  #: to and from experts
ROUTER = "choice of experts"
GRADIENTS = "weight gradients"  #: Apex's, which Megatron's own linear layers call

#: what Megatron's TransformerConfig asks for with moe_permute_fusion
#: (transformer/transformer_config.py of 0.16.1 and 0.19.2: "Please install TE >= 2.1.0")
_PERMUTE = """
fused_permute fused_permute_with_probs fused_sort_chunks_by_index fused_sort_chunks_by_index_with_probs fused_unpermute
"""


def find_kernels() -> frozenset[str]:
    """Those that are here; imports Megatron-core, and with it Transformer Engine where it is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Transformer Engine and Apex are not installed": that is the answer
        from megatron.core.extensions import transformer_engine
        from megatron.core.models.common.embeddings import rope_utils
        from megatron.core.tensor_parallel import layers
        from megatron.core.transformer.moe import moe_utils
    rotate = getattr(transformer_engine, "apply_rotary_pos_emb", None)  # from where Megatron's wrapper has it
    found = rope_kernels(getattr(rope_utils, "fused_apply_rotary_pos_emb_thd", None), rotate)
    if all(getattr(moe_utils, name, None) is not None for name in _PERMUTE.split()):
        found |= {PERMUTE}
    # transformer/moe/moe_utils.py: None before Transformer Engine 2.7
    if getattr(moe_utils, "fused_topk_with_score_function", None) is not None:
        found |= {ROUTER}
    # tensor_parallel/layers.py: whether it could import fused_weight_gradient_mlp_cuda, without which its
    # ColumnParallelLinear, the output layer among them, raises
    if getattr(layers, "_grad_accum_fusion_available", False):
        found |= {GRADIENTS}
    return frozenset(found)


def rope_kernels(wrapper: Callable[..., Any] | None, kernel: Callable[..., Any] | None) -> set[str]:
    """What the rotary embedding of packed sequences can do.

    Args:
        wrapper: Megatron's `fused_apply_rotary_pos_emb_thd`; that of 0.16.1 has no `interleaved`, and leaves unread
            that a model's columns are, that of 0.19.2 takes it.
        kernel: Transformer Engine's `apply_rotary_pos_emb`, which the wrapper calls; it takes `interleaved` since 2.3.
    """
    if wrapper is None:
        return set()
    return {ROPE, INTERLEAVED} if _takes(wrapper, "interleaved") and _takes(kernel, "interleaved") else {ROPE}


def _takes(function: Callable[..., Any] | None, name: str) -> bool:
    return function is not None and name in inspect.signature(function).parameters
