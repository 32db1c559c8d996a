"""Digests of tensors, by which engines are compared with the trainer."""

from __future__ import annotations

import pytest
import torch

from hpcrl.weights.comparison import cut, digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_digest_sees_every_bit_but_the_sign_of_zero(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 25).to(dtype).view(4, 6)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    assert digest(tensor.view(6, 4)) != before
    assert digest(tensor.to(torch.float64)) != before
    changed = tensor.clone()
    changed.view(torch.uint8)[2, 3] ^= 1
    assert digest(changed) != before
    if dtype.is_floating_point:
        assert digest(torch.tensor([0.0, 1.0], dtype=dtype)) == digest(torch.tensor([-0.0, 1.0], dtype=dtype))
        assert digest(torch.tensor([0.0], dtype=dtype)) != digest(torch.tensor([float("nan")], dtype=dtype))


def test_a_digest_of_a_part_is_that_of_the_cut_tensor() -> None:
    tensor = torch.arange(24.0).view(4, 6)
    assert digest(cut(tensor, [[1, 2]], [3, 3])) == digest(tensor[1:3, 3:6].clone())
    assert digest(cut(tensor, [[2, 1], [0, 1]], None)) == digest(tensor[[2, 0]])
    assert digest(cut(tensor, [[0, 4]], None)) == digest(tensor)
    assert digest(cut(tensor[0, 0], [], None)) == digest(torch.tensor(0.0))
