"""The log-ratio itself: unbiased, negative as often as not.

    k1 = r d,   d = log p - log p_ref,   r: 1, or the importance ratio (--use-unbiased-kl)

Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.  Its gradient as a loss
term has mean zero: use it in the reward (--kl-coef), not in the loss.
"""

from __future__ import annotations

from torch import Tensor


def kl(difference: Tensor, ratio: Tensor) -> Tensor:
    """k1 of each token."""
    return ratio * difference
