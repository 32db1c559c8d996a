"""Rewards of tokens and their discounted sums, over responses of any length at once.

Invariant: the steps of an episode are the trained tokens of a response, in order; what is masked between them (a tool's
answer, say) is not a step, takes no discount and has no reward, and every result is 0 there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.interface import RolloutBatch


def token_rewards(batch: RolloutBatch) -> Tensor:
    """float64 [t]: minus the KL penalty of each token, and the reward at the last trained one of each response."""
    rewards = batch.to_tokens(batch.reward).where(batch.last, 0.0) - batch.kl_penalty
    return rewards.where(batch.mask, 0.0)


def following(batch: RolloutBatch, values: Tensor) -> Tensor:
    """[t]: the value of the next trained token of the same response; 0 after the last."""
    steps, owner = _steps(batch)
    compact = values[steps]
    found = torch.zeros_like(values)
    found[steps] = torch.cat([compact[1:].where(owner[1:] == owner[:-1], 0.0), compact.new_zeros(min(1, len(compact)))])
    return found


def discounted_sums(batch: RolloutBatch, values: Tensor, factor: float) -> Tensor:
    """[t]: of each trained token the sum over s >= t of factor^(s - t) x value, over its response's trained tokens.

    By doubling: after pass k each holds the sum of its next 2^k, so a response of T tokens takes log2(T) passes.
    """
    steps, owner = _steps(batch)
    sums, reach = values[steps], 1
    longest = int(torch.bincount(owner).max()) if len(owner) else 0
    while reach < longest:
        ahead = sums[reach:].where(owner[reach:] == owner[:-reach], 0.0)
        sums = sums + factor**reach * torch.cat([ahead, ahead.new_zeros(reach)])
        reach *= 2
    found = torch.zeros_like(values)
    found[steps] = sums
    return found


def _steps(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Places of the trained tokens in [t], and which own response each belongs to."""
    owner = batch.spread(torch.arange(len(batch.own), device=batch.mask.device))
    return batch.mask.nonzero()[:, 0], owner[batch.mask]
