"""GSPO: PPO's clipped loss with the ratio of the whole response, the geometric mean of its tokens' ratios.

    s = exp(mean_t (log p_t - log p_old,t))        L_t = max(-s A_t, -clip(s, 1 - eps_clip, 1 + eps_clip_high) A_t)

Source: Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7.
Use: with --advantage-estimator gspo, which chooses it.
"""

from __future__ import annotations

from hpcrl.algorithms.interface import Terms, TokenBatch
from hpcrl.algorithms.losses.ppo import clipped_loss
from hpcrl.config.options import Options

OPTIONS = ("eps_clip", "eps_clip_high", "eps_clip_c")


def policy_loss(tokens: TokenBatch, options: Options) -> Terms:
    """The clipped loss of each token's response."""
    (log_ratio,) = tokens.sample_means(tokens.logprobs - tokens.old)
    return clipped_loss(log_ratio, tokens.advantages, options)
