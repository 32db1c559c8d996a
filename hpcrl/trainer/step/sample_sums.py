"""Sums over the trained tokens of each sample, wherever context parallelism put them.

Invariant: every CP rank gets the sum over all of them, and a loss that uses it has the gradient of the whole: what any
rank does with the sum flows back to the tokens of all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def sums_over_samples(
    values: torch.Tensor, sample: torch.Tensor, samples: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """float [k, samples]: each row of `values` [k, r] summed over the tokens of every sample; collective over `group`.

    sample: int64 [r], which sample a token belongs to.  group: the context-parallel ranks; None: one rank has all.
    """
    own = values.new_zeros(len(values), samples).index_add(1, sample, values)
    return own if group is None else _SumOverRanks.apply(own, group)


class _SumOverRanks(torch.autograd.Function):
    """An all-reduce whose gradient is the all-reduce of the ranks' gradients: each rank's loss depends on every rank's
    part."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        found = own.clone()
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradient.clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None
