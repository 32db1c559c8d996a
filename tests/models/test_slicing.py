"""Cutting Hugging Face tensors over tensor-parallel ranks, and putting them together again."""

from __future__ import annotations

import pytest
import torch

from hpcrl.models.slicing import CUTS, Shapes


def shapes(tp: int, groups: int = 4, vocab: int = 13) -> Shapes:
    return Shapes(heads=12, groups=groups, head_size=5, vocab=vocab, tp=tp, delta_heads=(12, 24, 3, 2))


def tensors(kind: str, s: Shapes) -> list[torch.Tensor]:
    sizes = {
        "same": [(7,)],
        "over_heads": [(7,)],
        "row": [(6, 24)],
        "column": [(24, 6)],
        "column_swapped": [(24, 6)],
        "vocab": [(s.vocab, 6)],
        "gate_up": [(24, 6)] * 2,
        "fused_gate_up": [(48, 6)],
        "qkv": [(s.heads * s.head_size, 6), (s.groups * s.head_size, 6), (s.groups * s.head_size, 6)],
        "gated_qkv": [(2 * s.heads * s.head_size, 6), (s.groups * s.head_size, 6), (s.groups * s.head_size, 6)],
        "delta_in": [(168, 6), (48, 6)],
        "delta_in_apart": [(120, 6), (48, 6), (24, 6), (24, 6)],
        "delta_conv": [(120, 1, 4)],
    }[kind]
    return [torch.arange(float(torch.tensor(size).prod())).view(size) + 1000 * i + 1 for i, size in enumerate(sizes)]


def part_shape(kind: str, s: Shapes) -> tuple[int, ...]:
    rows = (s.heads + 2 * s.groups) * s.head_size
    return {
        "same": (7,),
        "over_heads": (7,),
        "row": (6, 24 // s.tp),
        "column": (24 // s.tp, 6),
        "column_swapped": (24 // s.tp, 6),
        "vocab": (-(-s.vocab // s.tp), 6),
        "gate_up": (48 // s.tp, 6),
        "fused_gate_up": (48 // s.tp, 6),
        "qkv": (rows // s.tp, 6),
        "gated_qkv": ((rows + s.heads * s.head_size) // s.tp, 6),
        "delta_in": (216 // s.tp, 6),
        "delta_in_apart": (216 // s.tp, 6),
        "delta_conv": (120 // s.tp, 1, 4),
    }[kind]


@pytest.mark.parametrize("kind", CUTS)
@pytest.mark.parametrize(("tp", "groups"), [(1, 4), (2, 4), (4, 4), (2, 1), (4, 2), (3, 12)])
def test_join_is_the_inverse_of_part(kind: str, tp: int, groups: int) -> None:
    s = shapes(tp, groups)
    whole, shape = tensors(kind, s), part_shape(kind, s)
    parts = [CUTS[kind].part(whole, rank, shape, s) for rank in range(tp)]
    assert {tuple(p.shape) for p in parts} == {shape}
    joined = CUTS[kind].join(parts, s)
    assert [tuple(x.shape) for x in joined] == CUTS[kind].full(shape, s)
    assert all(torch.equal(a, b) for a, b in zip(joined, whole, strict=True))


def test_halves_of_the_columns_change_places() -> None:
    s = shapes(2)
    (whole,) = tensors("column_swapped", s)
    part = CUTS["column_swapped"].part([whole], 1, part_shape("column_swapped", s), s)
    assert torch.equal(part, whole[12:].roll(3, 1)) and not torch.equal(part, whole[12:])


def test_biases_are_cut_as_their_weights() -> None:
    s = shapes(2)
    whole = [t[:, 0].contiguous() for t in tensors("qkv", s)]
    shape = (part_shape("qkv", s)[0],)
    parts = [CUTS["qkv"].part(whole, rank, shape, s) for rank in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(CUTS["qkv"].join(parts, s), whole, strict=True))


def test_queries_lie_beside_their_key_and_value() -> None:
    s = shapes(1, groups=2)
    q, k, v = tensors("qkv", s)
    packed = CUTS["qkv"].part([q, k, v], 0, part_shape("qkv", s), s)
    assert torch.equal(packed[:30], q[:30])
    assert torch.equal(packed[30:35], k[:5])
    assert torch.equal(packed[35:40], v[:5])
    assert torch.equal(packed[40:70], q[30:])


def test_both_forms_of_a_delta_net_are_one() -> None:
    """Qwen3-Next's two tensors and Qwen3.5's four, of the same projection, become the same part."""
    s = shapes(2)
    keys, values, key, value = s.delta_heads
    each = values // keys
    four = tensors("delta_in_apart", s)
    query, k, v = four[0].split([keys * key, keys * key, values * value])
    heads = [x.unflatten(0, (keys, -1)) for x in (query, k, v, *four[1:])]
    two = [torch.cat(heads[:4], dim=1).flatten(0, 1), torch.cat(heads[4:], dim=1).flatten(0, 1)]
    shape = part_shape("delta_in", s)
    for rank in range(2):
        part = CUTS["delta_in"].part(two, rank, shape, s)
        assert torch.equal(part, CUTS["delta_in_apart"].part(four, rank, shape, s))
        assert torch.equal(part[:key], query[rank * keys // 2 * key :][:key])
        assert torch.equal(part[-each:], four[3][(rank + 1) * values // 2 - each : (rank + 1) * values // 2])


def test_gates_lie_below_the_queries_of_a_group() -> None:
    s = shapes(1, groups=4)
    q, k, v = tensors("gated_qkv", s)
    part = CUTS["gated_qkv"].part([q, k, v], 0, part_shape("gated_qkv", s), s)
    heads = q.view(12, 2, 5, 6)
    assert torch.equal(part[:30], heads[:3].transpose(0, 1).flatten(0, 2))
    assert torch.equal(part[30:40], torch.cat([k[:5], v[:5]]))


def test_vocabulary_padding_is_zero() -> None:
    """Padding rows of the vocabulary are zero, even a whole rank of them."""
    s = shapes(4, vocab=5)
    parts = [CUTS["vocab"].part([torch.ones(5, 3)], rank, (2, 3), s) for rank in range(4)]
    assert [int(p.sum()) for p in parts] == [6, 6, 3, 0]


def test_fused_gate_and_up() -> None:
    """A fused gate-and-up tensor is cut as the two would be."""
    s = shapes(2)
    gate, up = tensors("gate_up", s)
    shape = part_shape("gate_up", s)
    for rank in range(2):
        part = CUTS["fused_gate_up"].part([torch.cat([gate, up])], rank, shape, s)
        assert torch.equal(part, CUTS["gate_up"].part([gate, up], rank, shape, s))
