"""PPO's clipped loss: no gain from moving a token further than the bounds.

    r = exp(log p - log p_old)        L = max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A)
    --eps-clip-c c (dual clip):       where A < 0, min(L, -c A)

Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.  Unequal bounds (clip-higher): DAPO, Yu et al. 2025,
arXiv:2503.14476. Dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
Use: the default.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpcrl.algorithms.interface import Terms, TokenBatch, clip_range, ratio_of
from hpcrl.config.options import Options

OPTIONS = ("eps_clip", "eps_clip_high", "eps_clip_c")


def policy_loss(tokens: TokenBatch, options: Options) -> Terms:
    """The clipped loss of each token."""
    return clipped_loss(tokens.logprobs - tokens.old, tokens.advantages, options)


def clipped_loss(log_ratio: Tensor, advantages: Tensor, options: Options) -> Terms:
    """The formula above, of log-ratios [r] of whatever level; clipped where the bound decides."""
    low, high = clip_range(options)
    ratio = ratio_of(log_ratio)
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - low, 1 + high) * advantages
    loss = torch.maximum(plain, bounded)
    if options.eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -options.eps_clip_c * advantages), loss)
    return Terms(loss, (bounded > plain).to(loss.dtype))
