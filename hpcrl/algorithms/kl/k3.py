"""Unbiased and never negative, of low variance.

    k3 = r (exp(-d) - 1 + d),   d = log p - log p_ref,   r: 1, or the importance ratio (--use-unbiased-kl)

Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html; GRPO's, Shao et al. 2024,
arXiv:2402.03300, eq. 4.
"""

from __future__ import annotations

from torch import Tensor

from hpcrl.algorithms.interface import bound_of


def kl(difference: Tensor, ratio: Tensor) -> Tensor:
    """k3 of each token; both terms are held alike, or the linear one alone would have a gradient, of the wrong sign."""
    held = difference.clamp(min=-bound_of(difference.dtype))
    return ratio * ((-held).exp() - 1 + held)
