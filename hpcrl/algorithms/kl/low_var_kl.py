"""k3, held between -10 and 10 so that one token cannot blow up a step.

    low_var_kl = clip(r (exp(-d) - 1 + d), -10, 10),   d = log p - log p_ref
    r: 1, or the importance ratio (--use-unbiased-kl)

Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html; the bounds are slime's.
"""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.kl import k3

BOUND = 10.0


def kl(difference: Tensor, ratio: Tensor) -> Tensor:
    """k3 of each token, bounded."""
    return k3.kl(difference, ratio).clamp(-BOUND, BOUND)
