"""Buckets of weights: layout, copying in and out, what is refused from a wire; digests."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.weights.bucket import ALIGN, ITEM_BYTES, Bucket, Packer, fill, views
from hpcrl.weights.comparison import cut, digest

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
specs = st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), max_size=12)


def tensors_of(kinds: list[tuple[str, tuple[int, ...]]]) -> list[tuple[str, torch.Tensor]]:
    """Named tensors of arbitrary bits (NaN and infinities included)."""
    made = []
    for i, (dtype, shape) in enumerate(kinds):
        if dtype == "bool":
            tensor = torch.arange(prod(shape)) % 2 == 0
        else:
            tensor = torch.randint(0, 256, (prod(shape) * ITEM_BYTES[dtype],), dtype=torch.uint8).view(
                getattr(torch, dtype)
            )
        made.append((f"layer.{i}.weight", tensor.view(shape)))
    return made


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


@given(specs, st.integers(1, 700))
@settings(max_examples=150, deadline=None)
def test_what_goes_in_comes_out(kinds: list[tuple[str, tuple[int, ...]]], limit: int) -> None:
    tensors = tensors_of(kinds)
    found = []
    lasts = []
    one = torch.empty(0, dtype=torch.uint8)

    def room(number: int, size: int) -> torch.Tensor:
        nonlocal one
        assert number == len(lasts)  # called once a bucket, in order
        one = torch.empty(size, dtype=torch.uint8) if size > one.numel() else one  # the same memory again and again
        return one

    for bucket, buffer, last in fill(iter(tensors), limit, room):
        assert bucket.slots
        assert bucket.nbytes <= limit or len(bucket.slots) == 1
        assert bucket.nbytes <= buffer.numel()
        end = 0
        for slot in bucket.slots:
            assert slot.offset % ALIGN == 0
            assert end <= slot.offset < end + ALIGN
            end = slot.offset + slot.nbytes
        again = Bucket.from_wire(json.loads(json.dumps(bucket.to_wire())))
        assert again == bucket
        found += [(name, tensor.clone()) for name, tensor in views(buffer, again)]
        lasts.append(last)
    assert [name for name, _ in found] == [name for name, _ in tensors]
    assert all(same_bits(a, b) for (_, a), (_, b) in zip(found, tensors, strict=True))
    assert lasts == [False] * (len(lasts) - 1) + [True] * bool(lasts)


@given(specs, st.integers(64, 700))
@settings(max_examples=100, deadline=None)
def test_no_bucket_is_closed_early(kinds: list[tuple[str, tuple[int, ...]]], limit: int) -> None:
    packer, buckets = Packer(limit), []
    for i, (dtype, shape) in enumerate(kinds):
        if not packer.fits(dtype, shape):
            buckets.append((packer.take(), prod(shape) * ITEM_BYTES[dtype]))
        packer.add(str(i), dtype, shape)
    for bucket, following in buckets:
        assert -(-bucket.nbytes // ALIGN) * ALIGN + following > limit


def test_non_contiguous_tensor() -> None:
    """A tensor with another memory layout is copied in its logical order."""
    source = torch.arange(12.0).view(3, 4).t()
    [(bucket, buffer, last)] = fill([("t", source)], 4096, lambda _, size: torch.empty(size, dtype=torch.uint8))
    assert last
    assert torch.equal(views(buffer, bucket)[0][1], source)


def test_a_dtype_that_does_not_travel_is_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        list(
            fill(
                [("t", torch.zeros(1, dtype=torch.complex64))], 64, lambda _, size: torch.empty(size, dtype=torch.uint8)
            )
        )


GOOD: dict[str, Any] = {
    "names": ["a", "b"],
    "dtype_names": ["float32", "bfloat16"],
    "shapes": [[2, 3], [5]],
    "offsets": [0, 64],
    "nbytes": 74,
}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda w: w.update(names=["a"]),
        lambda w: w.update(names=["a", "a"]),
        lambda w: w.update(names=["a", ""]),
        lambda w: w.update(names=["a", 7]),
        lambda w: w.update(names=["a", ["b"]]),
        lambda w: w.update(dtype_names=["float32", "load"]),
        lambda w: w.update(dtype_names=["float32", ["float32"]]),
        lambda w: w.update(shapes=[[2, 3], [-5]]),
        lambda w: w.update(shapes=[[2, 3], [True]]),
        lambda w: w.update(shapes=[[2, 3], 5]),
        lambda w: w.update(shapes=[[2, 3], ["5"]]),
        lambda w: w.update(offsets=[0, 0]),
        lambda w: w.update(offsets=[0, 63]),
        lambda w: w.update(offsets=[-64, 64]),
        lambda w: w.update(offsets=[0, 64.0]),
        lambda w: w.update(nbytes=1000),
        lambda w: w.update(nbytes=None),
        lambda w: w.pop("shapes"),
    ],
)
def test_a_malformed_layout_is_refused(spoil: Callable[[dict[str, Any]], Any]) -> None:
    assert Bucket.from_wire(GOOD).nbytes == 74
    wire = {key: list(value) if isinstance(value, list) else value for key, value in GOOD.items()}
    spoil(wire)
    with pytest.raises(ValueError, match="malformed bucket"):
        Bucket.from_wire(wire)


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
