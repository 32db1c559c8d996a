"""Half the squared log-ratio: never negative, biased, but as a loss its gradient is that of the true KL on policy.

    k2 = d^2 / 2,   d = log p - log p_ref

Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from torch import Tensor


def kl(difference: Tensor, ratio: Tensor) -> Tensor:
    """k2 of each token."""
    return difference**2 / 2
