"""Gradients of what every expert-tensor-parallel rank holds whole and has a part of the gradient of.

Invariant: they are summed once for each optimizer step, after those of data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hpcrl.trainer.lora.layer import PARTIAL


def with_partial_gradients(finalize: Callable[..., None]) -> Callable[..., None]:
    """Megatron's last act on gradients, and these sums after it."""

    def finalize_all(model: Sequence[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
        finalize(model, *args, **kwargs)
        gradients = [
            parameter.main_grad
            for chunk in model
            for parameter in chunk.parameters()
            if parameter.requires_grad and getattr(parameter, PARTIAL, False)
        ]
        if gradients:
            flat = torch.cat([gradient.view(-1) for gradient in gradients])
            dist.all_reduce(flat, group=parallel_state.get_expert_tensor_parallel_group())
            parts = flat.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))

    return finalize_all
