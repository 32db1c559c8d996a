"""Half the squared log-ratio: never negative, biased, but as a loss its gradient is that of the true KL on policy.

    k2 = r d^2 / 2,   d = log p - log p_ref,   r: 1, or the importance ratio (--use-unbiased-kl)

Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from torch import Tensor


def kl(difference: Tensor, ratio: Tensor) -> Tensor:
    """k2 of each token."""
    return ratio * difference**2 / 2
