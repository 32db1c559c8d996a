"""CISPO: GRPO's advantages; the ratio is clipped as a weight, so that no token loses its gradient.

    A_it as grpo; the loss is cispo's (see losses/cispo.py)

Source: MiniMax 2025, arXiv:2506.13585.
Use: where clipping would silence rare but decisive tokens; --eps-clip 1 (no lower bound), --eps-clip-high 4.
"""

from __future__ import annotations

from hpcrl.algorithms.estimators.grpo import estimate

__all__ = ["estimate"]
NEEDS = ("groups",)
OPTIONS = ("disable_rewards_normalization", "disable_grpo_std_normalization")
LOSS = "cispo"
