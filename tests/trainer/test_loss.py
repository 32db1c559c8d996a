"""The losses against the same formulas in float64, written out; and their gradients against numbers and autograd."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.trainer.step import loss
from hpcrl.trainer.step.token_logprobs import Vocabulary, tokens

VOCAB, PADDED, ROWS = 11, 16, 23


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


def test_no_rows_are_no_loss() -> None:
    logits = torch.randn(0, PADDED, requires_grad=True)
    for of in (
        lambda found: loss.policy_loss(found, packed(torch.zeros(0), torch.zeros(0), None), CLIP, torch.zeros(0)),
        lambda found: loss.sft_loss(found, torch.zeros(0)),
    ):
        total, report = of(tokens(logits, torch.zeros(0, dtype=torch.int64), Vocabulary(VOCAB)))
        assert float(total.detach()) == 0.0
        assert not report.any()
        total.backward()
    assert logits.grad.shape == (0, PADDED)


# ---- policy loss

CLIP = loss.Clip(0.2, 0.28, None, 0.0)


def packed(advantages: torch.Tensor, rollout: torch.Tensor, old: torch.Tensor | None) -> SimpleNamespace:
    return SimpleNamespace(advantages=advantages, rollout_logprobs=rollout, old_logprobs=old)


def written_out(logprob: float, old: float, advantage: float, clip: loss.Clip) -> float:
    ratio = float(torch.tensor(logprob - old, dtype=torch.float64).exp())
    within = min(max(ratio, 1 - clip.low), 1 + clip.high)
    found = max(-ratio * advantage, -within * advantage)
    if clip.dual is not None and advantage < 0:
        found = min(found, -clip.dual * advantage)
    return found


SMALL = st.floats(-3, 3, allow_nan=False)


@given(SMALL, SMALL, SMALL, st.sampled_from([None, 1.5, 3.0]), st.floats(0, 0.9), st.floats(0, 2))
def test_terms_are_as_written_out(
    logprob: float, old: float, advantage: float, dual: float | None, low: float, high: float
) -> None:
    clip = loss.Clip(low, high, dual, 0.0)
    arrays = (torch.tensor([x], dtype=torch.float64) for x in (logprob, old, advantage))
    terms, _ = loss.policy_terms(*arrays, clip)
    assert float(terms) == pytest.approx(written_out(logprob, old, advantage, clip), rel=1e-12, abs=1e-12)


#: advantage, ratio, dual clip -> loss, its derivative by the log-prob, clipped
CASES = {
    "inside": (2.0, 1.1, None, -2.2, -2.2, 0.0),
    "above the upper bound": (2.0, 1.5, None, -2.56, 0.0, 1.0),
    "above the lower bound's mirror, below the upper": (2.0, 1.25, None, -2.5, -2.5, 0.0),
    "good and too rare": (2.0, 0.5, None, -1.0, -1.0, 0.0),
    "bad and already rarer": (-2.0, 0.5, None, 1.6, 0.0, 1.0),
    "bad and more likely": (-2.0, 5.0, None, 10.0, 10.0, 0.0),
    "bad and more likely, dual": (-2.0, 5.0, 3.0, 6.0, 0.0, 0.0),
    "good is not touched by dual": (2.0, 0.1, 3.0, -0.2, -0.2, 0.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_where_the_gradient_is_cut(case: tuple) -> None:
    advantage, ratio, dual, value, slope, clipped = case
    logprob = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    one = torch.tensor([advantage], dtype=torch.float64)
    terms, where = loss.policy_terms(logprob, torch.zeros_like(one), one, loss.Clip(0.2, 0.28, dual, 0.0))
    terms.sum().backward()
    assert (float(terms.detach()), float(logprob.grad), float(where)) == pytest.approx((value, slope, clipped))


def report(values: torch.Tensor) -> dict[str, float]:
    return dict(zip(loss.REPORT, values.tolist(), strict=True))


def test_policy_loss_and_its_report() -> None:
    logits, labels = inputs()
    generator = torch.Generator().manual_seed(2)
    found = tokens(logits, labels, Vocabulary(VOCAB))
    advantages, noise, more = torch.randn(3, ROWS, generator=generator, dtype=torch.float64)
    weights = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    old, rollout = found.logprobs.detach() + 0.3 * noise, found.logprobs.detach() + 0.3 * noise + 0.01 * more
    clip = loss.Clip(0.1, 0.2, 1.1, 0.05)
    total, got = loss.policy_loss(found, packed(advantages, rollout, old), clip, weights)
    terms = [written_out(*row, clip) for row in zip(found.logprobs.tolist(), old.tolist(), advantages.tolist(), strict=True)]
    pg = float((torch.tensor(terms, dtype=torch.float64) * weights).sum())
    entropy = float((found.entropy * weights).sum())
    assert float(total.detach()) == pytest.approx(pg - 0.05 * entropy)
    assert report(got) == pytest.approx(
        {
            "loss": pg - 0.05 * entropy,
            "pg_loss": pg,
            "pg_clipfrac": report(got)["pg_clipfrac"],
            "ppo_kl": float((0.3 * noise * weights).sum()),
            "entropy": entropy,
            "greedy": 0.0,
            "difference": float(0.01 * more.abs().sum()),
            "tokens": ROWS,
            "difference_max": float(0.01 * more.abs().max()),
        }
    )
    assert 0 < report(got)["pg_clipfrac"] < float(weights.sum())


def test_own_logprobs_are_the_old_ones_where_none_are_given() -> None:
    logits, labels = inputs()
    advantages = torch.randn(ROWS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = tokens(logits, labels, Vocabulary(VOCAB))
    total, got = loss.policy_loss(
        found, packed(advantages, torch.zeros_like(advantages), None), CLIP, torch.ones_like(advantages)
    )
    (gradient,) = torch.autograd.grad(total, logits)
    again = tokens(logits, labels, Vocabulary(VOCAB))
    (wanted,) = torch.autograd.grad(-(again.logprobs * advantages).sum(), logits)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-12)
    assert report(got)["ppo_kl"] == report(got)["pg_clipfrac"] == 0.0
    assert report(got)["difference"] == pytest.approx(float(-found.logprobs.sum()))


def test_the_difference_is_of_the_weights_that_sampled() -> None:
    """With the engine's log-probs as the old ones that is what the training forward says, not zero."""
    logits, labels = inputs()
    found = tokens(logits, labels, Vocabulary(VOCAB))
    rollout = found.logprobs.detach() - 0.5
    _, got = loss.policy_loss(found, packed(torch.ones(ROWS), rollout, rollout), CLIP, torch.ones(ROWS))
    assert report(got)["difference_max"] == pytest.approx(0.5)


def test_sft_loss_counts_the_weights() -> None:
    logits, labels = inputs()
    found = tokens(logits, labels, Vocabulary(VOCAB))
    weights = torch.arange(ROWS, dtype=torch.float64)
    total, got = loss.sft_loss(found, weights)
    assert float(total.detach()) == pytest.approx(float(-(plain(logits, labels, 1.0)[0] * weights).sum()))
    assert report(got)["greedy"] == float(weights[logits[:, :VOCAB].argmax(1) == labels].sum())
