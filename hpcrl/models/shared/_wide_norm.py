"""An RMS norm of queries or keys over all heads of a token together, as MiniMax-M2 has it.

    y = w x r,   r = 1 / sqrt(S / n + eps),   S = the sum of x^2 over the n columns of all heads

Tensor-parallel ranks have a part of the heads each: their sums are added up.  Where there are fewer heads than ranks,
several ranks have the same one, and it counts once.  With g = w dy, dx = r g - x r^3 / n sum(g x), that sum over all
heads too: of a head on several ranks, each of which passes on a part of its gradient, a part as well.

Invariants: every rank holds the whole weight, whose gradient Megatron adds up over tensor-parallel ranks by its name
(q_layernorm, k_layernorm); y is rounded once, as in vLLM's layer (that of transformers rounds x r, and then the product
with w); between the passes x and r are kept, and nothing in fp32 as large as x.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state


class NormOverHeads(torch.nn.Module):
    """In the place of a layer's q_layernorm or k_layernorm.

    Args:
        hidden_size: columns of one head, as Megatron makes such a norm.
        heads: of the whole model.
    """

    def __init__(self, config: Any, hidden_size: int, heads: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.heads = heads
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [t, b, heads of this rank, columns], normed; computed in fp32."""
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        first = parallel_state.get_tensor_model_parallel_rank() * self.heads // ranks
        weight = self.weight.view(self.heads, -1)[first : first + x.size(-2)]
        return _Normed.apply(x, weight, self.eps, self.weight.numel(), max(ranks // self.heads, 1))


class _Normed(torch.autograd.Function):
    """The norm of one rank's heads.

    Args of `apply`:
        weight: of these heads, [heads, columns].
        columns: of all heads of the model.
        copies: ranks that have the same head.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, columns: int, copies: int) -> torch.Tensor:
        wide = x.float()
        r = torch.rsqrt(_over_heads(wide.square()) / copies / columns + eps)
        ctx.save_for_backward(x, weight, r)
        ctx.sizes = columns, copies
        return (wide * r * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, r = ctx.saved_tensors
        columns, copies = ctx.sizes
        wide = x.float()
        dy = dy.float()
        d_weight = (dy * wide * r).sum((0, 1))
        g = dy * weight
        common = _over_heads(g * wide) * r**3 / columns / copies
        return (g * r - wide * common).to(x.dtype), d_weight.to(weight.dtype), None, None, None


def _over_heads(x: torch.Tensor) -> torch.Tensor:
    """The sum over the columns of all ranks' heads, [t, b, 1, 1]."""
    found = x.sum((-2, -1), keepdim=True)
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        torch.distributed.all_reduce(found, group=parallel_state.get_tensor_model_parallel_group())
    return found
