"""REINFORCE++ with a baseline: the reward minus its group's mean, whitened over the whole batch.

    A_it = R_i - mean(R) - kl_coef KL_it,   then --normalize-advantages
    --disable-rewards-normalization:  A_it = R_i - kl_coef KL_it

Source: Hu 2025, arXiv:2501.03262, "REINFORCE++-baseline".
Use: several responses to each prompt, where the spread within a group should not scale its rewards, but that of the
batch should.
"""

from __future__ import annotations

from hpcrl.algorithms.interface import Advantages, RolloutBatch
from hpcrl.config.options import Options

NEEDS = ("groups", "normalize_advantages")
OPTIONS = ("disable_rewards_normalization",)
KL = "token"


def estimate(batch: RolloutBatch, options: Options) -> Advantages:
    """Its advantages before whitening."""
    reward = batch.reward
    if not options.disable_rewards_normalization:
        reward = reward - batch.group_mean(reward)
    return Advantages(batch.to_tokens(reward) - batch.kl_penalty)
