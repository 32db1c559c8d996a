"""What of a piece has changed, and what is put back from it: the same bits, in no more bytes than the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.weights.pieces.elements import BLOCK, WHOLE, read, size, write
from hpcrl.weights.redistribution.loads import padded


@settings(deadline=None, max_examples=60)
@given(
    item=st.sampled_from([1, 2, 4]),
    elements=st.sampled_from([1, 7, 64, 4096, BLOCK, BLOCK + 3, 3 * BLOCK]),
    share=st.sampled_from([0.0, 1e-4, 0.01, 0.2, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_the_same_bits_come_out(item: int, elements: int, share: float, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    old = torch.randint(0, 256, (elements * item,), dtype=torch.uint8, generator=chance)
    flips = (torch.rand(elements, generator=chance) < share).repeat_interleave(item)
    new = torch.where(flips, old ^ 0x81, old)
    kept = old.clone()
    out = torch.full((int(padded(elements * item)),), 7, dtype=torch.uint8)
    count = write(new, kept, item, out)
    assert torch.equal(kept, new)
    assert size(count, elements, item) <= size(WHOLE, elements, item) == len(out)
    if count == WHOLE:
        assert torch.equal(out[: elements * item], new)
        return
    assert count == int((old.view(-1, item) != new.view(-1, item)).any(1).sum())
    found = old.view(-1, item).clone()
    if count:
        at, values = read(out, count, elements, item)
        found[at] = values.view(torch.uint8).view(-1, item)
    assert torch.equal(found.view(-1), new)


def test_size_of_sparse_changes() -> None:
    """Changes to a hundredth of the elements in bf16 take a fiftieth of the bytes."""
    assert size(BLOCK // 100, BLOCK, 2) < BLOCK * 2 // 48
    assert size(0, BLOCK, 2) == 0


@pytest.mark.parametrize(
    ("byte", "message"), [(0, "elements were to come, 1 were announced"), (5, "element .* of a piece of 100")]
)
def test_what_cannot_be_is_refused(byte: int, message: str) -> None:
    """The count of the block; a place beyond the end."""
    old = torch.zeros(200, dtype=torch.uint8)
    out = torch.zeros(256, dtype=torch.uint8)
    new = old.clone()
    new[40] = 1
    assert write(new, old, 2, out) == 1
    out[byte] = 77
    with pytest.raises(ValueError, match=message):
        read(out, 1, 100, 2)


def test_zeros_of_both_signs_and_nan_are_bits_too() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0, 2.0] * 64, dtype=torch.bfloat16)
    new = old.clone()
    new[0], new[5] = -0.0, 3.0
    kept = old.clone().view(torch.uint8)
    out = torch.zeros(512, dtype=torch.uint8)
    assert write(new.view(torch.uint8), kept, 2, out) == 2, "a NaN that is the same NaN has not changed"
    at, values = read(out, 2, 256, 2)
    assert at.tolist() == [0, 5]
    assert torch.equal(values.view(torch.uint8), new[[0, 5]].view(torch.uint8))
