"""k3 weighted by the importance ratio: value and gradient are those of the true KL off policy too.

    unbiased = r (exp(-d) - 1 + d),   d = log p - log p_ref,   r = p / p_old

Source: DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556, 3.1.  --use-unbiased-kl does the same to another estimator.
"""

from __future__ import annotations

from torch import Tensor


def kl(difference: Tensor, ratio: Tensor) -> Tensor:
    """r k3 of each token."""
    return ratio * ((-difference).exp() - 1 + difference)
