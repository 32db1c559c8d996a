"""Ratios of probabilities from their logarithms, held where a number would overflow.

Invariant: every value and gradient is finite, so that a token which counts nowhere (advantage 0, rejected, masked by
OPSM, clipped) adds exactly 0 to a gradient: infinity times 0 is NaN.  Below the bound nothing changes, bit for bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SLACK = 2.0  #: nats below the half, for what a product of two ratios is multiplied by


def bound_of(dtype: torch.dtype) -> float:
    """The largest log-ratio that is told from a larger one (42.4 in float32, 352.9 in float64): the product of two such
    ratios, as in a KL that is weighted by a ratio, is finite as well."""
    return math.log(torch.finfo(dtype).max) / 2 - SLACK


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio) of each, at most exp(`bound_of`), where the gradient is 0."""
    return log_ratio.clamp(max=bound_of(log_ratio.dtype)).exp()
