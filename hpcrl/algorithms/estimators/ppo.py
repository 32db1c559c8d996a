"""PPO: generalized advantage estimation from a critic's values.

    r_t = -kl_coef KL_t + [t is the last trained token] R         d_t = r_t + gamma V_{t+1} - V_t  (V after the last: 0)
    A_t = sum_{s >= t} (gamma lambd)^(s - t) d_s                  the critic learns A_t + V_t

Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; 2017, arXiv:1707.06347.  The steps of an episode are its trained
tokens.
Use: where tokens of one response deserve different credit and a second model of the same size is affordable.
"""

from __future__ import annotations

from hpcrl.algorithms.interface import Advantages, RolloutBatch
from hpcrl.algorithms.returns import discounted_sums, following, token_rewards
from hpcrl.config.options import Options
from hpcrl.errors import UsageError

NEEDS = ("critic",)
OPTIONS = ("gamma", "lambd")
KL = "token"


def estimate(batch: RolloutBatch, options: Options) -> Advantages:
    """GAE's advantages, and returns for the critic.  UsageError without values."""
    if batch.values is None:
        raise UsageError("--advantage-estimator ppo needs the values of a critic, which are missing")
    values = batch.values.double()
    change = token_rewards(batch) + options.gamma * following(batch, values) - values
    advantages = discounted_sums(batch, change, options.gamma * options.lambd)
    return Advantages(advantages, advantages + values.where(batch.mask, 0.0))
