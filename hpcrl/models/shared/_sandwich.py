"""A norm on what a block adds to the residual stream, as GLM-4-0414 has it after attention and after the MLP.

Invariant: it is Megatron's bias-dropout-add in every other respect, so a layer needs no class of its own and
checkpoints, recompute and tensor parallelism treat it as any layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class NormThenAdd(torch.nn.Module):
    """residual + norm(x), in the place of a layer's self_attn_bda or mlp_bda.

    Attributes:
        norm: a class like Megatron's norms, made from (config, hidden_size, eps).
    """

    def __init__(self, config: Any, norm: type) -> None:
        super().__init__()
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """The function that Megatron's layer calls with ((x, bias), residual, dropout probability), all [t, b,
        hidden]."""

        def add(
            x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
        ) -> torch.Tensor:
            x, bias = x_with_bias
            assert prob == 0.0, "dropout is off"
            return residual + self.norm(x if bias is None else x + bias)

        return add
