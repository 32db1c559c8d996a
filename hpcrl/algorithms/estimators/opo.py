"""OPO: the baseline of least variance, the mean reward of the group weighted by length.

    A_it = R_i - sum_j L_j R_j / sum_j L_j          L_j: tokens of response j; the plain mean where all are empty

Source: Hao et al. 2025, arXiv:2505.23585, eq. 8.
Use: exactly on policy (one optimizer step a rollout), without KL and entropy terms.
"""

from __future__ import annotations

from hpcrl.algorithms.interface import Advantages, RolloutBatch
from hpcrl.config.options import Options

NEEDS = ("groups",)


def estimate(batch: RolloutBatch, options: Options) -> Advantages:
    """OPO's advantages, the same for every token of a response."""
    length = batch.response_sum(batch.length.to(batch.reward.dtype))
    total = batch.group_sum(length)
    weighted = batch.group_sum(length * batch.reward) / total.clamp(min=1)
    return Advantages(batch.to_tokens(batch.reward - weighted.where(total > 0, batch.group_mean(batch.reward))))
