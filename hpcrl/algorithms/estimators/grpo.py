"""GRPO: the reward within its group, in standard deviations.

    A_it = (R_i - mean(R)) / (std(R) + 1e-6)        std: unbiased; a group of one is only centred
    --disable-grpo-std-normalization (Dr. GRPO):  A_it = R_i - mean(R)
    --disable-rewards-normalization:              A_it = R_i

Source: Shao et al. 2024, arXiv:2402.03300, 4.1.1.  Dr. GRPO: Liu et al. 2025, arXiv:2503.20783, with --pg-loss-divisor.
Use: the usual choice for rewards that can be checked, with several responses to each prompt and no critic.
"""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.interface import Advantages, RolloutBatch
from hpcrl.config.options import Options

NEEDS = ("groups",)
OPTIONS = ("disable_rewards_normalization", "disable_grpo_std_normalization")
EPSILON = 1e-6  #: keeps a group whose rewards are all equal at advantage 0


def estimate(batch: RolloutBatch, options: Options) -> Advantages:
    """GRPO's advantages, the same for every token of a response."""
    return Advantages(batch.to_tokens(group_advantages(batch, options)))


def group_advantages(batch: RolloutBatch, options: Options) -> Tensor:
    """[n]: the formula above."""
    if options.disable_rewards_normalization:
        return batch.reward
    centred = batch.reward - batch.group_mean(batch.reward)
    if options.disable_grpo_std_normalization:
        return centred
    size = batch.group_size
    std = (batch.group_sum(centred**2) / (size - 1).clamp(min=1)).sqrt()
    return centred / (std + EPSILON).where(size > 1, 1.0)
