"""The KL to a teacher against the same formulas in float64 and autograd, in pieces and in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpcrl.trainer.step.token_logprobs import Direction, TeacherRows, Vocabulary, divergence, tokens_of
from tests.support.live_bytes import LiveBytes

VOCAB = 11
PADDED = 16
ROWS = 23
HIDDEN = 8
DIRECTIONS: tuple[Direction, ...] = ("reverse", "forward")


def logits(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[ROWS, PADDED], whose padding columns are by far the greatest."""
    found = 3 * torch.randn(ROWS, PADDED, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found[:, VOCAB:] = 50.0
    return found.to(dtype)


def plain(student: torch.Tensor, teacher: torch.Tensor, temperature: float, direction: Direction) -> torch.Tensor:
    """By autograd's own operations."""
    x, y = ((z[:, :VOCAB] / temperature).log_softmax(-1) for z in (student, teacher))
    p, q = (x, y) if direction == "reverse" else (y, x)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-6)])
def test_it_is_the_formula(direction: Direction, temperature: float, dtype: torch.dtype, error: float) -> None:
    student, teacher = logits(0, dtype), logits(1, dtype)
    found = divergence(student, teacher, Vocabulary(VOCAB), temperature, direction)
    wanted = plain(student.double(), teacher.double(), temperature, direction)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), wanted, rtol=error, atol=error)
    itself = divergence(student, student.clone(), Vocabulary(VOCAB), temperature, direction)
    torch.testing.assert_close(itself.double(), torch.zeros(ROWS, dtype=torch.float64), rtol=0, atol=error)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradient_is_the_students(direction: Direction) -> None:
    """Its gradient is that of autograd and the student's alone."""
    student = logits(0).requires_grad_()
    teacher = logits(1).requires_grad_()
    weights = torch.linspace(0.5, 2, ROWS, dtype=torch.float64)
    found = divergence(student, teacher, Vocabulary(VOCAB), 0.7, direction)
    own, others = torch.autograd.grad((found * weights).sum(), (student, teacher), allow_unused=True)
    (wanted,) = torch.autograd.grad((plain(student, teacher, 0.7, direction) * weights).sum(), student)
    torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12)
    assert others is None and not own[:, VOCAB:].any()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_extreme_logits_stay_finite(direction: Direction) -> None:
    student = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    found = divergence(student, torch.tensor([[-1e4, 1e4, 0.0], [-1e30, -1e30, -1e30]]), Vocabulary(3), 1.0, direction)
    torch.testing.assert_close(found, torch.tensor([2e4, 0.0]))
    found.sum().backward()
    assert student.grad.isfinite().all()


def through(
    rows: int, vocabulary: int, chunk: int, direction: Direction, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, ...]:
    """The KL of each row from hidden states, and the gradients of hidden states and weight."""
    make = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=make, dtype=dtype)  # noqa: E731
    hidden = random(rows, 1, HIDDEN).requires_grad_()
    weight = random(vocabulary, HIDDEN).requires_grad_()
    teacher = TeacherRows(random(rows, 1, HIDDEN), random(vocabulary, HIDDEN), direction)
    labels = torch.randint(0, vocabulary, (rows,), generator=make)

    def head(states: torch.Tensor, other: torch.Tensor | None = None) -> Any:
        return (states @ (weight if other is None else other).T).squeeze(1)

    found = tokens_of(hidden, labels, head, Vocabulary(vocabulary), 0.7, chunk, teacher)
    total = ((found.divergence + 0.1 * found.logprobs) * torch.linspace(0.5, 2, rows)).sum()
    return found.divergence.detach(), *torch.autograd.grad(total, (hidden, weight))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("rows", [0, 1, 16, 37])
@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
def test_pieces_make_no_difference(direction: Direction, rows: int, chunk: int) -> None:
    for found, wanted in zip(through(rows, 61, chunk, direction), through(rows, 61, -1, direction), strict=True):
        assert (found.double() - wanted.double()).norm() <= 1e-12 * wanted.double().norm()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_memory_is_bounded_by_the_piece(direction: Direction) -> None:
    """Four times the rows need no more logits at once."""
    vocabulary, chunk = 4096, 64
    piece = 4 * chunk * vocabulary

    def peak(rows: int) -> int:
        with LiveBytes() as live:
            through(rows, vocabulary, chunk, direction, torch.float32)
        return live.peak

    short, long = peak(4 * chunk), peak(16 * chunk)
    assert long - short < 0.2 * piece
    assert long < 10 * piece
