"""Packed sequences: the zig-zag, the plan of batched attention calls, and that batching changes nothing."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from hpcrl.trainer.megatron import replaced, thd

LAYOUTS = {
    "equal": [24] * 7,
    "one": [5],
    "short": [3, 1, 8, 8, 2, 5, 1],
    "long tail": [7, 150, 12, 9, 60, 11, 4],
    "with an empty one": [4, 0, 6],
}


def bounds(lengths: list[int]) -> tuple[int, ...]:
    return tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))


def rounded(lengths: list[int], multiple: int) -> list[int]:
    return [-(-n // multiple) * multiple for n in lengths]


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_zig_zag_gives_every_row_to_one_rank(cp: int) -> None:
    cu = bounds(rounded([5, 17, 1, 40], 2 * cp))
    parts = [thd.cp_indices(cu, cp, rank) for rank in range(cp)]
    assert {len(p) for p in parts} == {cu[-1] // cp}
    assert sorted(torch.cat(parts).tolist()) == list(range(cu[-1]))


def test_zig_zag_of_two_ranks() -> None:
    assert thd.cp_indices([0, 8, 12], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert thd.cp_indices([0, 8, 12], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert replaced.positions(torch.tensor([0, 8, 12]), 6, 2, 1).tolist() == [2, 3, 4, 5, 1, 2]


def test_a_sequence_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="6.*cannot be cut into 4"):
        thd.cp_indices([0, 8, 14], 2, 0)


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: tuple[int, ...], scale: float) -> torch.Tensor:
    """Softmax attention, sequence by sequence, written out."""
    repeat = q.size(1) // k.size(1)
    out = []
    for start, end in pairwise(cu):
        keys, values = (x[start:end].repeat_interleave(repeat, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[start:end], keys) * scale
        future = torch.ones(end - start, end - start, dtype=torch.bool).triu(1)
        out.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(future, float("-inf")).softmax(-1), values))
    return torch.cat(out)


def leaves(rows: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, heads, 16, generator=generator).requires_grad_() for heads in (6, 2, 2)]


def backward(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]


def close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-6)


@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("call", [-1.0, 150.0, 1e9], ids=["each alone", "by cost", "all together"])
def test_batching_changes_nothing(lengths: list[int], call: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batching changes neither outputs nor gradients."""
    monkeypatch.setattr(thd, "CALL", call)
    cu, inputs = bounds(lengths), leaves(sum(lengths))
    plan = thd.plan(cu, 96)
    close(backward(thd.attend(*inputs, plan, 0.2), inputs), backward(naive(*inputs, cu, 0.2), inputs))


def test_padding_changes_nothing() -> None:
    """Attention is told of the padded bounds alone: rows of padding may hold anything."""
    lengths, multiple = LAYOUTS["short"], 8
    cu, real = (
        bounds(rounded(lengths, multiple)),
        torch.cat([torch.arange(n) + a for a, n in zip(bounds(rounded(lengths, multiple)), lengths, strict=False)]),
    )
    found = []
    for seed in (0, 1):
        inputs = [x.detach().clone() for x in leaves(cu[-1])]
        other = leaves(cu[-1], seed=seed + 10)
        padding = torch.ones(cu[-1], dtype=torch.bool)
        padding[real] = False
        for x, y in zip(inputs, other, strict=True):
            x[padding] = y.detach()[padding]
            x.requires_grad_()
        out = thd.attend(*inputs, thd.plan(cu, 96), 0.2)[real]
        found.append([out.detach(), *(g[real] for g in backward(out, inputs)[1:])])
    alone = [x.detach()[real].requires_grad_() for x in leaves(cu[-1])]
    close(found[0], found[1])
    close(found[0], backward(naive(*alone, bounds(lengths), 0.2), alone))


@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("call", [-1.0, 150.0, 1e9], ids=["each alone", "by cost", "all together"])
def test_context_parallel_ranks_agree(cp: int, call: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Context-parallel ranks together compute the same."""
    monkeypatch.setattr(thd, "CALL", call)
    cu = bounds(rounded(LAYOUTS["long tail"], 2 * cp))
    inputs = leaves(cu[-1])
    order = torch.cat([thd.cp_indices(cu, cp, rank) for rank in range(cp)])
    _, keys, values = (x[order] for x in inputs)  # as gathered from the ranks
    parts = []
    for rank in range(cp):
        mine = inputs[0][thd.cp_indices(cu, cp, rank)]
        parts.append(thd.attend(mine, keys, values, thd.plan(cu, 96, cp, rank), 0.2))
    out = torch.zeros_like(inputs[0]).index_copy(0, order, torch.cat(parts))
    close(backward(out, inputs), backward(naive(*inputs, cu, 0.2), inputs))


def test_cost_rule() -> None:
    """The cost rule batches short sequences and leaves long ones alone."""
    rng = random.Random(0)
    lengths = [rng.randint(8, 40) for _ in range(60)] + [2000, 1500]
    groups = thd.group(thd.segments(bounds(lengths)), width=128)
    assert [sorted(s.length for s in g) for g in groups[:2]] == [[2000], [1500]]
    assert sum(len(g) for g in groups) == 62
    assert len(groups) < 20
    padded = sum(len(g) * max(s.length for s in g) for g in groups)
    assert padded < 1.3 * sum(lengths)


def test_equal_sequences_are_only_viewed() -> None:
    plan = thd.plan(bounds([24] * 128), 128)
    assert plan.whole
    assert len(plan.buckets) == 1


def test_layers_share_a_plan() -> None:
    """Layers share the plan of a micro-batch, and only the latest plans are kept."""
    recent, other = thd.recent_plans(), thd.recent_plans()
    first = recent((0, 3), 96)
    assert recent((0, 3), 96) is first
    assert other((0, 3), 96) is not first  # nothing is shared between models
    for length in (4, 5, 6):
        recent((0, length), 96)
    assert recent((0, 3), 96) is first  # the latest four
    for length in (7, 8, 9, 10):
        recent((0, length), 96)
    assert recent((0, 3), 96) is not first


def test_naive_reference_agrees_with_torch() -> None:
    q, k, v = leaves(9)
    theirs = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=0.2, enable_gqa=True
    )
    torch.testing.assert_close(naive(q, k, v, (0, 9), 0.2), theirs.transpose(0, 1), rtol=0, atol=1e-6)
