"""Elements as bits: tensors of the host copied without a look at what their numbers mean.

Invariant: what is copied has the same bits, or, between dtypes, torch's rounding.
"""

from __future__ import annotations

import numpy as np
import torch

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  #: of an element's size


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, in the shape and with the item size that it has."""
    return tensor.view(WORDS[tensor.element_size()])


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)`, of the same shape."""
    if target.device.type == source.device.type == "cpu" and target.dtype == source.dtype:
        np.copyto(
            words(target.detach()).numpy(), words(source.detach()).numpy()
        )  # of rows with gaps a quarter quicker than torch
    else:
        target.copy_(source)
