"""Copies of elements as bits."""

from __future__ import annotations

import pytest
import torch

from hpcrl.weights.pieces.elements import copy


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
def test_bits_are_copied_and_memory_stays_what_it_was(dtype: torch.dtype) -> None:
    """Views with gaps, NaN of any kind; afterwards the memory of both can still be resized, as weights are put away."""
    raw = torch.randint(0, 256, (6, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    source, target = raw.view(dtype), torch.zeros_like(raw).view(dtype)
    copy(target[1:4, ::2], source[2:5, ::2])
    size = source.element_size()
    wanted, found = torch.zeros_like(raw), target.view(torch.uint8)
    for column in range(0, 40 // size, 2):
        wanted[1:4, column * size : (column + 1) * size] = raw[2:5, column * size : (column + 1) * size]
    assert torch.equal(found, wanted)
    copy(target[:0], source[:0])
    for tensor in (source, target):
        tensor.untyped_storage().resize_(0)


def test_another_dtype_is_rounded() -> None:
    target = torch.zeros(3, dtype=torch.bfloat16)
    copy(target, torch.tensor([1.0, 1.00390625, 3.14159]))
    assert torch.equal(target, torch.tensor([1.0, 1.00390625, 3.14159]).bfloat16())
