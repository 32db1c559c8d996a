"""CISPO: REINFORCE with a clipped, constant importance weight; every token keeps its gradient.

    L = -sg(clip(r, 1 - eps_clip, 1 + eps_clip_high)) A log p        r = exp(log p - log p_old), sg: no gradient

Source: MiniMax 2025, arXiv:2506.13585, eq. 4 and 5.
Use: with --advantage-estimator cispo, which chooses it; --eps-clip 1 (no lower bound), --eps-clip-high 4.
"""

from __future__ import annotations

from hpcrl.algorithms.interface import Terms, TokenBatch, clip_range, ratio_of
from hpcrl.config.options import Options

OPTIONS = ("eps_clip", "eps_clip_high")


def policy_loss(tokens: TokenBatch, options: Options) -> Terms:
    """The weighted REINFORCE loss of each token; clipped where the weight was."""
    low, high = clip_range(options)
    ratio = ratio_of(tokens.logprobs.detach() - tokens.old)
    weight = ratio.clamp(1 - low, 1 + high)
    return Terms(-weight * tokens.advantages * tokens.logprobs, (weight != ratio).to(ratio.dtype))
