"""Two places where vLLM's CPU build keeps old weights after an update, and what we do about each.

Both are silent in stock vLLM 0.32 (wrong log-probs, no error); the checksum mode notices either.

1. A tied output head.  The CPU build multiplies with a packed copy of each matrix (`layer.cpu_linear`) that is made when
   a layer's own weights arrive.  A tied head has none of its own, so its copy stays that of the start.
   -> `pack_heads` packs all embeddings again after an update.
2. Mixture-of-experts layers.  Experts are packed only where no kernel exists yet; after the first load one does, and new
   weights land unpacked in a packed buffer.
   -> `drop_expert_kernels` before an update, `return_expert_kernels` where the update did not reach a layer.

Nothing of vLLM is replaced; its own methods are called once more.  On CUDA neither is needed.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

Kernels = list[tuple[Any, Any]]


def pack_heads(model: nn.Module) -> None:
    """Make the packed copies of all embeddings and heads anew from their weights."""
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading(layer)


def drop_expert_kernels(model: nn.Module) -> Kernels:
    """Make the experts be packed again when their weights arrive; returns what to put back where none arrive."""
    dropped = []
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            dropped.append((method, method.moe_kernel))
            method.moe_kernel = None
    return dropped


def return_expert_kernels(dropped: Kernels) -> None:
    """Undo `drop_expert_kernels` for the layers that an update did not reach."""
    for method, kernel in dropped:
        if method.moe_kernel is None:
            method.moe_kernel = kernel
