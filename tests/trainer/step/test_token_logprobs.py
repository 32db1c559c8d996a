"""Log-probs and entropy of a vocabulary against the same formulas in float64 and autograd, in pieces and in bounded
memory."""

from __future__ import annotations

import pytest
import torch

from hpcrl.trainer.step.token_logprobs import Vocabulary, tokens, tokens_of
from tests.support.live_bytes import LiveBytes

VOCAB = 11
PADDED = 16
ROWS = 23


def inputs(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [ROWS, PADDED], whose padding columns are by far the greatest, and labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(ROWS, PADDED, generator=generator, dtype=torch.float64)
    logits[:, VOCAB:] = 50.0
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[::3] = logits[::3, :VOCAB].argmax(1)
    return logits.to(dtype).requires_grad_(), labels


def plain(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy over the real vocabulary, by autograd's own operations."""
    every = (logits[:, :VOCAB] / temperature).log_softmax(-1)
    return every.gather(1, labels[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-6)])
def test_real_vocabulary(dtype: torch.dtype, error: float, temperature: float) -> None:
    """Log-probs and entropy are those of the real vocabulary."""
    logits, labels = inputs(dtype)
    found = tokens(logits, labels, Vocabulary(VOCAB), temperature)
    logprobs, entropy = plain(logits.detach().double(), labels, temperature)
    assert found.logprobs.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.logprobs.double(), logprobs, rtol=0, atol=error)
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=0, atol=error)
    assert torch.equal(found.greedy, logits[:, :VOCAB].argmax(1) == labels)


@pytest.mark.parametrize("temperature", [1.0, 0.1, 3.0])
def test_only_the_likeliest_token_is_greedy(temperature: float) -> None:
    """A token that is nearly as likely is not; of two that are equally likely both are."""
    for gap in (1e-3, 0.1, 0.5, 0.99, 1.5, 5.0):
        logits = torch.tensor([[2.0, 2.0 - gap, -1.0, 9.0], [2.0 - gap, 2.0, -1.0, 9.0], [2.0, 2.0, 1.0, 9.0]])
        for label, wanted in ((0, [True, False, True]), (1, [False, True, True]), (2, [False] * 3)):
            found = tokens(logits.clone(), torch.full((3,), label), Vocabulary(3), temperature)
            assert found.greedy.tolist() == wanted, (gap, label)


def test_gradients_are_those_of_autograd() -> None:
    logits, labels = inputs()
    weights = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for which in ((1, 0), (0, 1), (1, 1)):
        gradients = []
        for values in (tokens(logits, labels, Vocabulary(VOCAB), 0.7)[:2], plain(logits, labels, 0.7)):
            total = sum(
                (value * weight).sum() for value, weight, used in zip(values, weights, which, strict=True) if used
            )
            gradients += torch.autograd.grad(total, logits)
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
        assert not gradients[0][:, VOCAB:].any()


def test_the_gradient_has_the_type_of_the_logits() -> None:
    logits, labels = inputs(torch.bfloat16)
    tokens(logits, labels, Vocabulary(VOCAB)).logprobs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e30, -1e30, -1e30]], requires_grad=True)
    found = tokens(logits, torch.tensor([1, 0]), Vocabulary(3))
    torch.testing.assert_close(found.logprobs, torch.tensor([-2e4, -1.0986123]))
    torch.testing.assert_close(found.entropy, torch.tensor([0.0, 1.0986123]))
    (found.logprobs.sum() + found.entropy.sum()).backward()
    assert logits.grad.isfinite().all()


# ---- from hidden states, in pieces

HIDDEN = 8


def head(rows: int, vocabulary: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [rows, 1, HIDDEN], weight [vocabulary, HIDDEN], both with a gradient, and labels."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 1, HIDDEN, generator=generator)
    weight = torch.randn(vocabulary, HIDDEN, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, vocabulary, (rows,), generator=generator)


def through(rows: int, vocabulary: int, chunk: int, grad: bool = True) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropy, greedy, and of a weighted sum of the first two the gradients of hidden states and weight."""
    hidden, weight, labels = head(rows, vocabulary)
    with torch.set_grad_enabled(grad):
        found = tokens_of(hidden, labels, lambda h: (h @ weight.T).squeeze(1), Vocabulary(vocabulary), 0.7, chunk)
    if not grad:
        return found[:3]
    scale = torch.linspace(0.5, 2, rows)
    total = (found.logprobs * scale).sum() + 0.3 * (found.entropy * scale).sum()
    return *(part.detach() for part in found[:3]), *torch.autograd.grad(total, (hidden, weight))


@pytest.mark.parametrize("rows", [0, 1, 16, 37])
@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
def test_pieces_make_no_difference(rows: int, chunk: int) -> None:
    whole = through(rows, 61, -1)
    for found, wanted in zip(through(rows, 61, chunk), whole, strict=True):
        assert (found.double() - wanted.double()).norm() <= 1e-6 * wanted.double().norm()
    for found, wanted in zip(through(rows, 61, chunk, grad=False), whole, strict=False):
        assert (found.double() - wanted.double()).norm() <= 1e-6 * wanted.double().norm()


@pytest.mark.parametrize("grad", [True, False])
def test_memory_is_bounded_by_the_piece(grad: bool) -> None:
    """The peak is that of a piece's logits, not of the rows': four times the rows need no more; without pieces they
    do."""
    vocabulary, chunk = 4096, 64
    logits = 4 * chunk * vocabulary  # bytes of one piece in fp32

    def peak(rows: int, chunk: int) -> int:
        with LiveBytes() as live:
            through(rows, vocabulary, chunk, grad)
        return live.peak

    short, long = peak(4 * chunk, chunk), peak(16 * chunk, chunk)
    assert long - short < 0.2 * logits
    assert long < 5 * logits
    assert peak(16 * chunk, -1) > 30 * logits
