"""TIS: the loss of each token is weighted by its truncated importance ratio.

    w_t = clip(exp(log p_trainer,t - log p_engine,t), tis_clip_low, tis_clip)

Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; Ionides 2008,
doi:10.1198/106186008X320456.
Use: the first thing to try where engine and trainer differ (other kernels, FP8, mixture of experts).
"""

from __future__ import annotations

import torch

from hpcrl.algorithms.interface import Correction, TokenBatch, importance_report, ratio_of
from hpcrl.config.options import Options

OPTIONS = ("tis_clip", "tis_clip_low")


def correct(tokens: TokenBatch, options: Options) -> Correction:
    """Truncated weights; every token is kept."""
    ratio = ratio_of(tokens.trainer - tokens.rollout)
    weights = ratio.clamp(options.tis_clip_low, options.tis_clip)
    return Correction(weights, torch.ones_like(ratio), importance_report(ratio, weights != ratio))
