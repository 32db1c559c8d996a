"""What an engine multiplies with: the values of FP8 codes with their scales, in the plainest form."""

from __future__ import annotations

import torch


def dequantize(quantized: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None = None) -> torch.Tensor:
    """The fp32 matrix that codes and scales stand for; `block` for scales of blocks, None for rows or one scale."""
    if block is not None:
        rows, columns = quantized.shape
        scale = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return quantized.float() * scale
