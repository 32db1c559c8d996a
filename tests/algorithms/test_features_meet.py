"""Where features meet: responses of several samples with KL and overlong punishment, rejection with other reducers,
several optimizer steps; each against what the features are alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.algorithms.advantages import compute_advantages
from hpcrl.algorithms.corrections import mis
from hpcrl.algorithms.interface import RolloutBatch
from hpcrl.algorithms.loss import compute_loss, policy_token_weights, token_weights
from hpcrl.config.options import Options
from tests.algorithms.batches import options, over_ranks, random_samples, token_batch

#: (estimator, more options): those whose advantages are of whole responses
OF_RESPONSES = [
    ("grpo", {}),
    ("grpo", {"disable_grpo_std_normalization": True}),
    ("grpo", {"disable_rewards_normalization": True}),
    ("gspo", {}),
    ("cispo", {}),
    ("rloo", {}),
    ("opo", {}),
]
MORE = [
    {},
    {"kl_coef": 0.3, "kl_loss_type": "k2"},
    {"overlong_buffer_len": 6, "overlong_penalty_factor": 2.0, "rollout_max_response_len": 14},
    {"kl_coef": 0.2, "kl_loss_type": "k3", "overlong_buffer_len": 9, "rollout_max_response_len": 12},
    {"kl_coef": 0.1, "normalize_advantages": True},
    {"use_opd": True, "opd_kl_coef": 0.4, "kl_coef": 0.1, "normalize_advantages": True},
    {"use_opd": True, "opd_kl_type": "reverse", "kl_coef": 0.1},
]

responses = st.lists(  # (group, reward, samples of so many tokens)
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([0.0, 1.0, -0.5, 2.25]),
        st.lists(st.integers(0, 5), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=7,
)


def batches(found: list[tuple[int, float, list[int]]], seed: int, filling: int) -> tuple[RolloutBatch, RolloutBatch]:
    """The responses whole, and cut into their samples with `filling` samples of one token that count nowhere."""
    found = sorted(found, key=lambda row: row[0])
    chance = torch.Generator().manual_seed(seed)
    tokens = sum(sum(parts) for *_, parts in found)
    columns = {
        name: -torch.rand(tokens, generator=chance, dtype=torch.float64) for name in ("old", "reference", "teacher")
    }
    mask = torch.rand(tokens, generator=chance) < 0.8

    def batch(rows: list[tuple[int, float, int, int]], more: int, cut: bool) -> RolloutBatch:
        group, reward, length, response = zip(*rows, *[(0, 9.0, 1, -1)] * more, strict=True)
        pad = lambda column: torch.cat([column, torch.full((more,), -0.5, dtype=column.dtype)])  # noqa: E731
        return RolloutBatch(
            reward=torch.tensor(reward, dtype=torch.float64),
            group=torch.tensor(group),
            length=torch.tensor(length),
            truncated=torch.zeros(len(group), dtype=torch.bool),
            own=torch.arange(len(group)),
            mask=torch.cat([mask, torch.zeros(more, dtype=torch.bool)]),
            response=torch.tensor(response) if cut else None,
            **{name: pad(column) for name, column in columns.items()},
        )

    whole = [(group, reward, sum(parts), number) for number, (group, reward, parts) in enumerate(found)]
    samples = [
        (group, reward, length, number) for number, (group, reward, parts) in enumerate(found) for length in parts
    ]
    return batch(whole, 0, False), batch(samples, filling, True)


@settings(max_examples=60)
@given(responses, st.integers(0, 999), st.integers(0, 3), st.sampled_from(OF_RESPONSES), st.sampled_from(MORE))
def test_a_cut_response_learns_as_the_whole(
    found: list[tuple[int, float, list[int]]],
    seed: int,
    filling: int,
    estimator: tuple[str, dict[str, Any]],
    more: dict[str, Any],
) -> None:
    """KL and overlong punishment are of the response, whatever it is cut into: every token has the advantage that it
    has in the whole, and what fills a step up has none and changes none."""
    name, own = estimator
    o = options(advantage_estimator=name, **own, **more)
    whole, cut = batches(found, seed, filling)
    wanted = compute_advantages(whole, o).advantages
    mine = compute_advantages(cut, o).advantages
    torch.testing.assert_close(mine[: len(wanted)], wanted, rtol=0, atol=1e-9)
    assert not mine[len(wanted) :].any()


@settings(max_examples=20)
@given(responses, st.integers(0, 999), st.integers(0, 2), st.sampled_from(MORE))
def test_cut_responses_on_several_ranks(
    found: list[tuple[int, float, list[int]]], seed: int, filling: int, more: dict[str, Any]
) -> None:
    """The samples of one response may be on different ranks: the advantages are the same."""
    o = options(advantage_estimator="grpo", **more)
    _, cut = batches(found, seed, filling)
    wanted = compute_advantages(cut, o).advantages.split(cut.length.tolist())
    count = len(cut.length)
    shares = [list(range(rank, count, 2)) for rank in range(2)]
    columns = ("mask", "old", "reference", "teacher")
    parts = {name: getattr(cut, name).split(cut.length.tolist()) for name in columns}

    def one(rank: int, total: Any) -> torch.Tensor:
        own = shares[rank]
        pick = {name: torch.cat([parts[name][i] for i in own] or [parts[name][0][:0]]) for name in columns}
        return compute_advantages(
            replace(cut, own=torch.tensor(own, dtype=torch.int64), total=total, **pick), o
        ).advantages

    for own, mine in zip(shares, over_ranks(one, 2), strict=True):
        torch.testing.assert_close(mine, torch.cat([wanted[i] for i in own] or [mine[:0]]), rtol=0, atol=1e-9)


# ---- rejection with every reducer

REJECTS = {
    "use_tis": True,
    "custom_tis_function_path": "mis",
    "use_rs": True,
    "rs_level": "token",
    "rs_lower_bound": 0.8,
    "rs_upper_bound": 1.3,
}
REDUCERS: list[dict[str, Any]] = [
    {},
    {"calculate_per_token_loss": True},
    {"pg_loss_divisor": 7.0},
    {"custom_pg_loss_reducer_function_path": f"{__name__}.by_root"},
]
TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k2", "entropy_coef": 0.1}


def by_root(counts: torch.Tensor, o: Options) -> torch.Tensor:
    """An own reducer: by the root of the length."""
    return 1 / counts.clamp(min=1).float().sqrt()


def weighted(o: Options, seed: int = 3) -> tuple[Any, torch.Tensor]:
    """A batch with the weights of `o`'s reducer, and the log-probs to differentiate by."""
    samples = random_samples(seed)
    counts = torch.tensor([s.count for s in samples])
    tokens = token_batch(samples)
    p = tokens.logprobs.clone().requires_grad_()
    own = policy_token_weights(counts, o)
    return replace(
        tokens,
        logprobs=p,
        weights=token_weights(counts, o).double()[tokens.sample],
        pg_weights=None if own is None else own.double()[tokens.sample],
        divergence=tokens.entropy**2,
    ), p


@pytest.mark.parametrize("reducer", REDUCERS, ids=str)
@pytest.mark.parametrize("loss", ["ppo", "gspo", "sapo", "reinforce"])
def test_a_rejected_token_counts_nowhere(reducer: dict[str, Any], loss: str) -> None:
    """With every reducer: it has no gradient where the loss is of tokens, and each term is that of the kept tokens with
    the weights that they have among all."""
    o = options(**(REJECTS | TERMS | reducer), pg_loss_type=loss)
    tokens, p = weighted(o)
    ratio = (tokens.trainer - tokens.rollout).exp()
    kept = (ratio >= 0.8) & (ratio <= 1.3)
    assert 0 < int(kept.sum()) < len(kept)
    found = compute_loss(tokens, o)
    (gradient,) = torch.autograd.grad(found.total, p)
    if loss != "gspo":  # whose ratio is made of all tokens of a response
        assert not gradient[~kept].any() and gradient[kept].any()
    plain = options(**({"use_tis": True} | TERMS | reducer), pg_loss_type=loss)
    zero = lambda x: None if x is None else x * kept  # noqa: E731
    without = replace(tokens, weights=zero(tokens.weights), pg_weights=zero(tokens.pg_weights))
    wanted = compute_loss(without, plain)
    for name in ("loss", "pg_loss", "entropy_loss", "kl_loss", "opd_sampled_kl"):
        assert float(found.report.means[name]) == pytest.approx(float(wanted.report.means[name]), abs=1e-12), name


@pytest.mark.parametrize("reducer", REDUCERS, ids=str)
def test_a_whole_response_is_rejected(reducer: dict[str, Any]) -> None:
    """A veto takes all tokens of a response out, with every reducer, and no other."""
    o = options(**(REJECTS | reducer | {"rs_lower_bound": 1e-9, "rs_upper_bound": 1e9, "rs_veto_threshold": 0.5}))
    tokens, p = weighted(o)
    (gradient,) = torch.autograd.grad(compute_loss(tokens, o).total, p)
    low = (tokens.trainer - tokens.rollout).exp() < 0.5
    vetoed = torch.zeros(tokens.samples, dtype=torch.bool).index_fill_(0, tokens.sample[low], True)[tokens.sample]
    assert 0 < int(vetoed.sum()) < len(vetoed)
    assert not gradient[vetoed].any() and gradient[~vetoed].any()


def test_rejection_by_mode_and_by_bounds() -> None:
    """--tis-mode mask and --use-rs reject independently: a token has to pass both."""
    o = options(**(REJECTS | {"tis_mode": "mask", "tis_clip": 1.1, "tis_clip_low": 0.3}))
    tokens, p = weighted(o)
    (gradient,) = torch.autograd.grad(compute_loss(tokens, o).total, p)
    ratio = (tokens.trainer - tokens.rollout).exp()
    kept = (ratio >= 0.8) & (ratio <= 1.1)
    assert int(((ratio > 1.1) & (ratio <= 1.3)).sum()) and int(((ratio < 0.8) & (ratio >= 0.3)).sum())
    assert not gradient[~kept].any()


# ---- metrics of tokens whose advantage is 0


def zero_advantages() -> tuple[Any, torch.Tensor]:
    """A batch of which every other response has advantage 0."""
    samples = random_samples(5)
    for sample in samples[::2]:
        sample.advantages = sample.advantages * 0
    return token_batch(samples), torch.tensor([number % 2 == 0 for number in range(len(samples))])


def test_opsm_masks_no_token_of_advantage_zero() -> None:
    """opsm_clipfrac counts tokens of negative advantage of responses that have moved, and those of advantage 0 not."""
    tokens, idle = zero_advantages()
    moved = replace(tokens, old=tokens.logprobs + 1.0)
    found = compute_loss(moved, options(use_opsm=True, opsm_delta=0.5)).report.means["opsm_clipfrac"]
    wanted = float(((moved.advantages < 0) * moved.weights).sum())
    assert float(found) == pytest.approx(wanted) and wanted > 0
    assert not (moved.advantages[idle[moved.sample]] < 0).any()
    still = replace(tokens, old=tokens.logprobs)
    assert not compute_loss(still, options(use_opsm=True, opsm_delta=0.0)).report.means["opsm_clipfrac"]


def test_gmpo_bounds_advantage_zero_from_below() -> None:
    """As the code of its authors: the upper bound is for positive advantages alone, and pg_clipfrac says so."""
    tokens, idle = zero_advantages()
    high = replace(tokens, old=tokens.logprobs - 1.0)
    low = replace(tokens, old=tokens.logprobs + 1.0)
    o = options(pg_loss_type="gmpo", eps_clip=0.2, eps_clip_high=0.5)
    for batch, cut in ((high, batch_sign(high) > 0), (low, batch_sign(low) <= 0)):
        found = float(compute_loss(batch, o).report.means["pg_clipfrac"])
        assert found == pytest.approx(float((cut * batch.weights).sum()))
    assert idle.any()


def batch_sign(tokens: Any) -> torch.Tensor:
    return tokens.advantages.sign()


def test_ppo_cuts_no_token_within_its_bounds() -> None:
    """pg_clipfrac counts tokens for which the bound decides: none at ratio 1, none of advantage 0, all beyond it."""
    tokens, _ = zero_advantages()
    same = replace(tokens, old=tokens.logprobs)
    assert not compute_loss(same, options()).report.means["pg_clipfrac"]
    far = replace(tokens, old=tokens.logprobs - 1.0)
    found = float(compute_loss(far, options(eps_clip=0.2, eps_clip_high=0.3)).report.means["pg_clipfrac"])
    assert found == pytest.approx(float(((far.advantages > 0) * far.weights).sum()))


@pytest.mark.parametrize("name", ["gspo", "ppo"])
def test_metrics_of_the_ratio_are_of_its_level(name: str) -> None:
    """ppo_kl and ois are of tokens, and with gspo of whole responses, as its ratio is."""
    tokens, _ = zero_advantages()
    report = compute_loss(tokens, options(pg_loss_type=name)).report.means
    kl = tokens.old - tokens.logprobs
    if name == "gspo":
        (kl,) = tokens.sample_means(kl)
    assert float(report["ppo_kl"]) == pytest.approx(float((kl * tokens.weights).sum()))
    assert float(report["ois"]) == pytest.approx(float(((-kl).exp() * tokens.weights).sum()))


def test_metrics_leave_rejected_tokens_out() -> None:
    """pg_clipfrac and ppo_kl are of the tokens that are kept; ois of all."""
    o = options(**REJECTS, eps_clip=0.05)
    tokens, _ = weighted(o)
    ratio = (tokens.trainer - tokens.rollout).exp()
    kept = ((ratio >= 0.8) & (ratio <= 1.3)).double()
    found = compute_loss(tokens, o).report.means
    p = tokens.logprobs.detach()
    r = (p - tokens.old).exp()
    cut = torch.where(tokens.advantages > 0, r > 1.05, r < 0.95) & (tokens.advantages != 0)
    assert float(found["pg_clipfrac"]) == pytest.approx(float((cut * kept * tokens.weights).sum()))
    assert float(found["ppo_kl"]) == pytest.approx(float(((tokens.old - p) * kept * tokens.weights).sum()))
    assert float(found["ois"]) == pytest.approx(float((r * tokens.weights).sum()))
    assert math.isfinite(float(found["loss"]))


def test_a_veto_belongs_to_rejection() -> None:
    """Without --use-rs nothing is vetoed, and nothing is said of it: as in slime."""
    o = options(**(REJECTS | {"use_rs": False, "rs_veto_threshold": 0.9}))
    tokens, p = weighted(o)
    found = compute_loss(tokens, o)
    (gradient,) = torch.autograd.grad(found.total, p)
    plain = compute_loss(tokens, options(use_tis=True))
    assert torch.equal(gradient, torch.autograd.grad(plain.total, p)[0])
    assert "rs_catastrophic_seq_fraction" not in found.report.means


def test_what_a_correction_would_change_is_said() -> None:
    """tis_clipfrac counts ratios beyond either bound, whether they are corrected or not."""
    tokens = token_batch(random_samples(1))
    ratio = (tokens.trainer - tokens.rollout).exp()
    for more in ({}, {"use_tis": True}, {"use_tis": True, "custom_tis_function_path": "icepop"}):
        found = compute_loss(tokens, options(tis_clip=1.2, tis_clip_low=0.9, **more)).report.means["tis_clipfrac"]
        assert float(found) == pytest.approx(float((((ratio > 1.2) | (ratio < 0.9)) * tokens.weights).sum()))


def test_a_group_of_one_response_is_only_centred() -> None:
    """Also one of several samples whose rewards differ: they are not divided by their spread."""
    batch, _ = batches([(0, 1.0, [3])], 0, 0)
    one = replace(
        batch,
        reward=torch.tensor([1.0, 0.0], dtype=torch.float64),
        group=torch.zeros(2, dtype=torch.int64),
        length=torch.tensor([1, 2]),
        truncated=torch.zeros(2, dtype=torch.bool),
        own=torch.arange(2),
        mask=torch.ones(3, dtype=torch.bool),
        response=torch.zeros(2, dtype=torch.int64),
    )
    assert compute_advantages(one, options()).advantages.tolist() == pytest.approx([0.5, -0.5, -0.5])


def test_a_distribution_of_a_teacher_is_no_advantage() -> None:
    """--opd-kl-type reverse and forward are terms of the loss; sampled alone is taken off advantages."""
    whole, _ = batches([(0, 1.0, [4]), (0, 0.0, [3])], 1, 0)
    plain = compute_advantages(whole, options()).advantages
    for kind in ("reverse", "forward", "sampled"):
        found = compute_advantages(whole, options(use_opd=True, opd_kl_type=kind, opd_kl_coef=0.5)).advantages
        wanted = plain - 0.5 * (whole.old - whole.teacher) * whole.mask if kind == "sampled" else plain
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_mean_over_responses_of_one_token(level: str) -> None:
    """Each counts once: weights divided by their mean have the mean 1."""
    samples = [sample for sample in random_samples(5) if sample.length][:3]
    for sample in samples:
        for name in ("mask", "logprobs", "old", "trainer", "rollout", "reference", "entropy", "advantages"):
            setattr(sample, name, getattr(sample, name)[:1])
        sample.mask[:] = True
    tokens = token_batch(samples)
    o = Options(use_tis=True, tis_level=level, tis_clip=1e9, tis_batch_normalize=True)
    ratio = (tokens.trainer - tokens.rollout).exp()
    torch.testing.assert_close(mis.correct(tokens, o).weights, ratio / ratio.mean())
