"""GSPO: GRPO's advantages; the ratio, and its clipping, are of whole responses.

    A_it as grpo; the loss is gspo's (see losses/gspo.py)

Source: Zheng et al. 2025, arXiv:2507.18071.
Use: mixture-of-experts models and long responses, where the ratios of single tokens are noisy; --eps-clip 3e-4,
--eps-clip-high 4e-4.
"""

from __future__ import annotations

from hpcrl.algorithms.estimators.grpo import estimate

__all__ = ["estimate"]
NEEDS = ("groups",)
OPTIONS = ("disable_rewards_normalization", "disable_grpo_std_normalization")
LOSS = "gspo"
