"""k3 weighted by the importance ratio: value and gradient are those of the true KL off policy too.

    unbiased = r (exp(-d) - 1 + d),   d = log p - log p_ref,   r = p / p_old

Source: DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556, 3.1.  The same as k3 with --use-unbiased-kl.
"""

from __future__ import annotations

from hpcrl.algorithms.kl.k3 import kl

__all__ = ["kl"]
