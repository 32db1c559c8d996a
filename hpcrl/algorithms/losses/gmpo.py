"""GMPO: the geometric mean over a response of its tokens' clipped ratios.

    d_t = log p_t - log p_old,t        c_t = min(d_t, eps_clip_high) where A > 0, else max(d_t, -eps_clip)
    L_t = -A_t exp(mean_t c_t)

Source: Zhao et al. 2025, arXiv:2507.20673, eq. 4; the bounds are of log-ratios, so ratios are within exp(-eps_clip) and
exp(eps_clip_high).
Use: steadier than ppo where single ratios are extreme; wide bounds, --eps-clip 0.4.
"""

from __future__ import annotations

import torch

from hpcrl.algorithms.interface import Terms, TokenBatch, clip_range, ratio_of
from hpcrl.config.options import Options

OPTIONS = ("eps_clip", "eps_clip_high")


def policy_loss(tokens: TokenBatch, options: Options) -> Terms:
    """The loss of each token's response; clipped where the token's own ratio was."""
    low, high = clip_range(options)
    difference = tokens.logprobs - tokens.old
    bounded = torch.where(tokens.advantages > 0, difference.clamp(max=high), difference.clamp(min=-low))
    (mean,) = tokens.sample_means(bounded)
    return Terms(-tokens.advantages * ratio_of(mean), (bounded != difference).detach().to(difference.dtype))
