"""REINFORCE++: discounted returns of the reward and of the KL of each token, whitened over the whole batch.

    r_t = -kl_coef KL_t + [t is the last trained token] R         A_t = sum_{s >= t} gamma^(s - t) r_s
    then --normalize-advantages

Source: Hu 2025, arXiv:2501.03262.  The steps of an episode are its trained tokens.
Use: without groups and without a critic; a reward for the whole response, KL in the reward.
"""

from __future__ import annotations

from hpcrl.algorithms.interface import Advantages, RolloutBatch
from hpcrl.algorithms.returns import discounted_sums, token_rewards
from hpcrl.config.options import Options

NEEDS = ("normalize_advantages",)
OPTIONS = ("gamma",)
KL = "token"


def estimate(batch: RolloutBatch, options: Options) -> Advantages:
    """REINFORCE++'s advantages before whitening."""
    return Advantages(discounted_sums(batch, token_rewards(batch), options.gamma))
