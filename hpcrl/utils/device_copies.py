"""Copies from host to device that wait for nothing.

A blocking copy, and one from ordinary memory, holds the host until the GPU has done all that was asked of it: the
queue of kernels runs empty.  Invariant: what is copied here was pinned for it, and torch keeps the pinned block until
the copy is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_device(values: torch.Tensor | np.ndarray, device: torch.device | str) -> torch.Tensor:
    """`values` on `device`: on a CPU themselves, on a GPU a copy that is under way."""
    found: Any = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if torch.device(device).type == "cpu":
        return found
    return found.pin_memory().to(device, non_blocking=True)
