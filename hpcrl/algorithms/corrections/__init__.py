"""Corrections for the difference between the engine that sampled and the trainer that learns.

Each file holds `correct(tokens, options) -> Correction`.  The ratio is exp(tokens.trainer - tokens.rollout): the
trainer's probability of a token under the weights that sampled, over the engine's.  Nothing here carries a gradient.
"""

from __future__ import annotations

from torch import Tensor


def importance_report(ratio: Tensor, changed: Tensor) -> dict[str, Tensor]:
    """What is reported of ratios [r], and of where a correction changed them, in slime's names."""
    return {"tis": ratio, "tis_clipfrac": changed.to(ratio.dtype), "tis_abs": (ratio - 1).abs()}
