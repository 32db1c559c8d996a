"""The gated delta rule in chunks: what it is row by row, with the same gradients, and no sequence sees another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch

from hpcrl.trainer.megatron import thd
from hpcrl.trainer.megatron.delta_net_layer import causal_conv, gated_delta_rule, unit

KEY, VALUE, HEADS = 10, 6, 3
LENGTHS = (1, 70, 3, 128, 64, 5, 5)
COLUMNS = HEADS * (2 * KEY + VALUE + 2)


def step_by_step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor
) -> torch.Tensor:
    """Equation 10 of arXiv 2412.06464, a row at a time."""
    state = value.new_zeros(*value.shape[:2], key.size(-1), value.size(-1))
    out = []
    for row in range(query.size(2)):
        q, k, v, b = (x[:, :, row, None] for x in (query, key, value, rate[..., None]))
        state = decay[:, :, row, None, None].exp() * state
        state = state + k.transpose(2, 3) @ (b * (v - k @ state))
        out.append(q @ state)
    return torch.cat(out, dim=2)


def drawn(rows: int, sequences: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k = (unit(torch.randn(sequences, HEADS, rows, KEY, generator=generator)) for _ in range(2))
    v = torch.randn(sequences, HEADS, rows, VALUE, generator=generator)
    decay, rate = (torch.rand(sequences, HEADS, rows, generator=generator) for _ in range(2))
    return [q, k, v, -4 * decay, rate]


def results(rule: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients of a made-up loss."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = rule(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (out * weights.to(out.dtype)).sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("rows", [1, 7, 64, 130])
@pytest.mark.parametrize("chunk", [4, 64])
def test_chunks_are_the_rule_row_by_row(rows: int, chunk: int) -> None:
    inputs = drawn(rows)
    exact = results(step_by_step, [x.double() for x in inputs])
    for found, wanted in zip(results(partial(gated_delta_rule, chunk=chunk), inputs), exact, strict=True):
        assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())


def sequence(rows: torch.Tensor, conv: torch.Tensor) -> torch.Tensor:
    """A small delta net, rows [n, longest, COLUMNS] -> [n, longest, HEADS * VALUE]."""
    rows = causal_conv(rows, conv).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    query, key, value, decay, rate = rows.split([KEY, KEY, VALUE, 1, 1], dim=-1)
    out = gated_delta_rule(unit(query), unit(key), value, -decay[..., 0].exp(), rate[..., 0].sigmoid())
    return out.transpose(1, 2).flatten(2)


def packed(rows: torch.Tensor, conv: torch.Tensor, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    ends = tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))
    return thd.by_sequence(rows, thd.plan(ends, COLUMNS), partial(sequence, conv=conv))


def alone(rows: torch.Tensor, conv: torch.Tensor) -> torch.Tensor:
    """Each sequence by itself."""
    return torch.cat([sequence(part[None], conv)[0] for part in rows.split(LENGTHS)])


def leaking(rows: torch.Tensor, conv: torch.Tensor, state: bool) -> torch.Tensor:
    """What a layer computes that takes the packed row for one sequence: in its state, or in its convolution."""
    if not state:
        mixed = causal_conv(rows[None], conv)[0]
        one = torch.zeros_like(conv)
        one[..., -1] = 1.0  # a convolution that leaves each row as it is
        return alone(mixed, one)
    return packed(rows, conv, (sum(LENGTHS),))


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(sum(LENGTHS), COLUMNS, generator=generator),
        torch.randn(COLUMNS, 1, 4, generator=generator) / 2,
    ]


def worst(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def test_packed_sequences_are_each_alone(inputs: list[torch.Tensor]) -> None:
    assert worst(results(packed, inputs), results(alone, inputs)) < 1e-5


@pytest.mark.parametrize("state", [True, False])
def test_a_leak_between_sequences_shows(inputs: list[torch.Tensor], state: bool) -> None:
    """A planted fault: the comparison above finds state, or a convolution, that reaches the next sequence."""
    assert worst(results(partial(leaking, state=state), inputs), results(alone, inputs)) > 1e-2


def test_no_row_sees_another_sequence(inputs: list[torch.Tensor]) -> None:
    """Gradients of one sequence's output at the rows of all others are exactly zero."""
    rows, conv = inputs[0].requires_grad_(), inputs[1]
    out = packed(rows, conv)
    ends = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    for start, end in pairwise(ends):
        (found,) = torch.autograd.grad(out[start:end].sum(), rows, retain_graph=True)
        assert float(found[start:end].abs().max()) > 0
        assert not found[:start].any() and not found[end:].any()
