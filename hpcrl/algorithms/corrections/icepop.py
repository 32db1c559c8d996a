"""IcePop: a token whose importance ratio is out of bounds has no policy gradient; the others are weighted by theirs.

    w_t = k_t if tis_clip_low <= k_t <= tis_clip, else 0        k_t = exp(log p_trainer,t - log p_engine,t)

Source: Ling team 2025, "Small leak can sink a great ship", ringtech.notion.site/icepop; Every Step Evolves,
arXiv:2510.18855, 3.2.
Use: mixture-of-experts models, whose routing makes a few ratios extreme; --tis-clip-low 0.5, --tis-clip 5.
"""

from __future__ import annotations

import torch

from hpcrl.algorithms.interface import Correction, TokenBatch, importance_report, ratio_of
from hpcrl.config.options import Options

OPTIONS = ("tis_clip", "tis_clip_low")


def correct(tokens: TokenBatch, options: Options) -> Correction:
    """Weights that are 0 out of bounds; every token is kept in the other terms."""
    ratio = ratio_of(tokens.trainer - tokens.rollout)
    inside = (ratio >= options.tis_clip_low) & (ratio <= options.tis_clip)
    return Correction(ratio.where(inside, 0.0), torch.ones_like(ratio), importance_report(ratio, ~inside))
