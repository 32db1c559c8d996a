"""Every estimator against its paper's formula, written out in float64 over single samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.algorithms.advantages import compute_advantages, overlong_penalty
from hpcrl.algorithms.interface import Advantages, RolloutBatch
from hpcrl.config.options import Options
from hpcrl.config.plugin_names import algorithm_files
from hpcrl.errors import DataError, HpcrlError, UsageError
from tests.algorithms.batches import Sample, options, over_ranks, random_samples, rollout_batch

SEEDS = range(12)
LEFT = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}


# ---- the references: lists of floats, one list a sample


def group_of(samples: Sequence[Sample], one: Sample) -> list[Sample]:
    return [s for s in samples if s.group == one.group]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def kl_of(sample: Sample, kind: str) -> list[float]:
    """KL of each token, 0 where it is masked."""
    pairs = zip(sample.old, sample.reference, sample.mask, strict=True)
    return [LEFT[kind](float(o - r)) if m else 0.0 for o, r, m in pairs]


def grpo(samples: Sequence[Sample], one: Sample, o: Options, rewards: dict[int, float]) -> float:
    own = rewards[id(one)]
    every = [rewards[id(s)] for s in group_of(samples, one)]
    if o.disable_rewards_normalization:
        return own
    if o.disable_grpo_std_normalization or len(every) == 1:
        return own - mean(every)
    deviation = math.sqrt(math.fsum((x - mean(every)) ** 2 for x in every) / (len(every) - 1))
    return (own - mean(every)) / (deviation + 1e-6)


def rloo(samples: Sequence[Sample], one: Sample, o: Options, rewards: dict[int, float]) -> float:
    others = [rewards[id(s)] for s in group_of(samples, one) if s is not one]
    return rewards[id(one)] - mean(others) if others else 0.0


def remax(samples: Sequence[Sample], one: Sample, o: Options, rewards: dict[int, float]) -> float:
    return rewards[id(one)] - one.baseline


def opo(samples: Sequence[Sample], one: Sample, o: Options, rewards: dict[int, float]) -> float:
    group = group_of(samples, one)
    tokens = sum(s.length for s in group)
    if tokens == 0:
        return rewards[id(one)] - mean([rewards[id(s)] for s in group])
    return rewards[id(one)] - math.fsum(s.length * rewards[id(s)] for s in group) / tokens


def none(samples: Sequence[Sample], one: Sample, o: Options, rewards: dict[int, float]) -> float:
    return 0.0


OF_RESPONSES = {"none": none, "grpo": grpo, "gspo": grpo, "cispo": grpo, "rloo": rloo, "remax": remax, "opo": opo}


def steps_of(sample: Sample, o: Options, reward: float) -> list[tuple[int, float]]:
    """(place, reward) of each trained token: minus the KL, and the response's reward at the last."""
    kl = kl_of(sample, o.kl_loss_type) if o.kl_coef else [0.0] * sample.length
    places = [t for t in range(sample.length) if sample.mask[t]]
    return [(t, -o.kl_coef * kl[t] + (reward if t == places[-1] else 0.0)) for t in places]


def reinforce_plus_plus(sample: Sample, o: Options, reward: float) -> list[float]:
    steps, found = steps_of(sample, o, reward), [0.0] * sample.length
    for k, (t, _) in enumerate(steps):
        found[t] = math.fsum(o.gamma ** (j - k) * steps[j][1] for j in range(k, len(steps)))
    return found


def gae(sample: Sample, o: Options, reward: float) -> tuple[list[float], list[float]]:
    """Advantages and returns, by the sum of eq. 16 of arXiv:1506.02438 over the trained tokens."""
    steps = steps_of(sample, o, reward)
    value = [float(sample.values[t]) for t, _ in steps] + [0.0]
    delta = [r + o.gamma * value[k + 1] - value[k] for k, (_, r) in enumerate(steps)]
    advantages, returns = [0.0] * sample.length, [0.0] * sample.length
    for k, (t, _) in enumerate(steps):
        advantages[t] = math.fsum((o.gamma * o.lambd) ** (j - k) * delta[j] for j in range(k, len(steps)))
        returns[t] = advantages[t] + value[k]
    return advantages, returns


def whitened(values: list[list[float]], samples: Sequence[Sample]) -> list[list[float]]:
    kept = [x for row, s in zip(values, samples, strict=True) for x, m in zip(row, s.mask, strict=True) if m]
    if not kept:
        return [[0.0] * s.length for s in samples]
    variance = math.fsum((x - mean(kept)) ** 2 for x in kept) / max(len(kept) - 1, 1)
    scale = 1 / math.sqrt(variance + 1e-8)
    return [
        [(x - mean(kept)) * scale if m else 0.0 for x, m in zip(row, s.mask, strict=True)]
        for row, s in zip(values, samples, strict=True)
    ]


def reference(samples: Sequence[Sample], o: Options) -> tuple[np.ndarray, np.ndarray | None]:
    """Advantages and returns of all tokens, one after another."""
    rewards, returns = {id(s): s.reward for s in samples}, None
    name = o.advantage_estimator
    if name in OF_RESPONSES:
        if o.kl_coef:
            rewards = {id(s): s.reward - o.kl_coef * math.fsum(kl_of(s, o.kl_loss_type)) for s in samples}
        values = [[OF_RESPONSES[name](samples, s, o, rewards) if m else 0.0 for m in s.mask] for s in samples]
    elif name == "ppo":
        both = [gae(s, o, s.reward) for s in samples]
        values = [x for x, _ in both]
        returns = np.concatenate([x for _, x in both])
    elif name == "reinforce_plus_plus":
        values = [reinforce_plus_plus(s, o, s.reward) for s in samples]
    else:
        values = []
        for s in samples:
            centre = 0.0 if o.disable_rewards_normalization else mean([x.reward for x in group_of(samples, s)])
            kl = kl_of(s, o.kl_loss_type) if o.kl_coef else [0.0] * s.length
            values.append([s.reward - centre - o.kl_coef * k if m else 0.0 for k, m in zip(kl, s.mask, strict=True)])
    if o.use_opd:
        gaps = [[float(p - q) if m else 0.0 for p, q, m in zip(s.old, s.teacher, s.mask, strict=True)] for s in samples]
        values = [
            [a - o.opd_kl_coef * gap for a, gap in zip(row, own, strict=True)]
            for row, own in zip(values, gaps, strict=True)
        ]
    if o.normalize_advantages:
        values = whitened(values, samples)
    return np.concatenate(values), returns


CASES: list[dict[str, Any]] = [
    {"advantage_estimator": "grpo"},
    {"advantage_estimator": "grpo", "normalize_advantages": True},
    {"advantage_estimator": "grpo", "kl_coef": 0.3, "kl_loss_type": "k3"},
    {"advantage_estimator": "grpo", "disable_grpo_std_normalization": True},
    {"advantage_estimator": "grpo", "disable_rewards_normalization": True},
    {"advantage_estimator": "gspo"},
    {"advantage_estimator": "cispo"},
    {"advantage_estimator": "rloo"},
    {"advantage_estimator": "rloo", "kl_coef": 0.05},
    {"advantage_estimator": "remax"},
    {"advantage_estimator": "remax", "normalize_advantages": True},
    {"advantage_estimator": "opo"},
    {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
    {
        "advantage_estimator": "reinforce_plus_plus",
        "gamma": 0.9,
        "kl_coef": 0.2,
        "kl_loss_type": "k2",
        "normalize_advantages": True,
    },
    {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.2, "normalize_advantages": True},
    {
        "advantage_estimator": "reinforce_plus_plus_baseline",
        "disable_rewards_normalization": True,
        "normalize_advantages": True,
    },
    {"advantage_estimator": "none", "use_opd": True},
    {"advantage_estimator": "none", "use_opd": True, "opd_kl_coef": 0.3, "normalize_advantages": True},
    {"advantage_estimator": "grpo", "use_opd": True, "opd_kl_coef": 0.5},
    {"advantage_estimator": "ppo", "use_opd": True, "opd_kl_coef": 0.2, "kl_coef": 0.1},
    {"advantage_estimator": "ppo"},
    {"advantage_estimator": "ppo", "gamma": 0.97, "lambd": 0.8, "kl_coef": 0.1},
    {"advantage_estimator": "ppo", "gamma": 0.9, "lambd": 0.0, "normalize_advantages": True},
]


def label(case: dict[str, Any]) -> str:
    return " ".join(str(v) if k == "advantage_estimator" else f"{k}={v}" for k, v in case.items())


@pytest.mark.parametrize("case", CASES, ids=label)
@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_the_formula(case: dict[str, Any], seed: int) -> None:
    samples, o = random_samples(seed), options(**case)
    found = compute_advantages(rollout_batch(samples), o)
    advantages, returns = reference(samples, o)
    np.testing.assert_allclose(found.advantages.numpy(), advantages, rtol=0, atol=1e-6)
    assert (found.returns is None) == (returns is None)
    if returns is not None:
        np.testing.assert_allclose(found.returns.numpy(), returns, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_samples_may_be_on_any_rank(case: dict[str, Any]) -> None:
    """Advantages do not depend on which rank holds which sample."""
    samples, o = random_samples(3), options(**case)
    whole = compute_advantages(rollout_batch(samples), o)
    ends = np.cumsum([s.length for s in samples])
    order = np.random.default_rng(5).permutation(len(samples)).tolist()
    shares = [order[:2], order[2:9], [], order[9:]]

    def one(rank: int, total: Any) -> Advantages:
        return compute_advantages(rollout_batch(samples, shares[rank], total=total), o)

    for own, found in zip(shares, over_ranks(one, len(shares)), strict=True):
        wanted = [whole.advantages[ends[i] - samples[i].length : ends[i]] for i in own]
        torch.testing.assert_close(found.advantages, torch.cat([*wanted, torch.zeros(0).double()]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_nothing_to_train_on_is_no_error(case: dict[str, Any]) -> None:
    samples = random_samples(1)
    for s in samples:
        s.mask[:] = False
    found = compute_advantages(rollout_batch(samples), options(**case))
    assert not found.advantages.any()
    assert found.advantages.isfinite().all()


def test_every_estimator_is_tested() -> None:
    assert {case["advantage_estimator"] for case in CASES} == set(algorithm_files("estimators"))


@pytest.mark.parametrize("case", CASES, ids=label)
def test_what_was_not_graded_is_no_member(case: dict[str, Any]) -> None:
    """The advantages of a group are those without its responses whose grading failed."""
    samples, o = random_samples(4, groups=(4, 3, 5)), options(**case)
    out = {1, 4, 9, 10}
    for i in out:
        samples[i].mask[:] = False
        samples[i].reward = 40.0
    number = torch.tensor([-1 if i in out else i for i in range(len(samples))])
    found = compute_advantages(rollout_batch(samples, response=number), o)
    wanted = compute_advantages(rollout_batch([s for i, s in enumerate(samples) if i not in out]), o)
    owner = np.repeat(np.arange(len(samples)), [s.length for s in samples])
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert not one[np.isin(owner, list(out))].any()
            torch.testing.assert_close(one[~np.isin(owner, list(out))], other, rtol=0, atol=1e-9)
    none = compute_advantages(rollout_batch(samples, response=torch.full_like(number, -1)), o)
    assert all(part is None or part.isfinite().all() for part in none)


@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_response_of_several_samples(name: str) -> None:
    """One response cut into three samples, and one that fills the step up: the advantages of its tokens are those of
    the whole."""
    o = options(advantage_estimator=name, normalize_advantages=name == "reinforce_plus_plus_baseline")
    reward, length = [1.0, 0.0, 0.5, 2.0], [4, 9, 3, 5]
    chance = torch.Generator().manual_seed(1)
    columns = {"old": torch.rand(21, generator=chance), "reference": torch.rand(21, generator=chance)}

    def batch(rewards: list[float], lengths: list[int], response: list[int] | None, filling: int) -> RolloutBatch:
        count = len(lengths)
        mask = torch.ones(sum(lengths), dtype=torch.bool)
        mask[len(mask) - filling :] = False
        return RolloutBatch(
            reward=torch.tensor(rewards, dtype=torch.float64),
            group=torch.zeros(count, dtype=torch.int64),
            length=torch.tensor(lengths),
            truncated=torch.zeros(count, dtype=torch.bool),
            own=torch.arange(count),
            mask=mask,
            response=None if response is None else torch.tensor(response),
            **{name: torch.cat([column, torch.zeros(filling)]) for name, column in columns.items()},
        )

    whole = compute_advantages(batch(reward, length, None, 0), o).advantages
    cut = batch([1.0, 0.0, 0.0, 0.0, 0.5, 2.0, 7.0], [4, 2, 3, 4, 3, 5, 1], [0, 1, 1, 1, 2, 3, -1], 1)
    found = compute_advantages(cut, o).advantages
    assert torch.allclose(found[:-1], whole, atol=1e-12, rtol=0) and found[-1] == 0
    naive = compute_advantages(batch([1.0, 0.0, 0.0, 0.0, 0.5, 2.0], [4, 2, 3, 4, 3, 5], None, 0), o).advantages
    assert name in ("opo", "reinforce_plus_plus_baseline") or not torch.allclose(naive, whole), (
        "else this is less than 1"
    )


def test_equal_rewards_are_no_advantage() -> None:
    samples = random_samples(0)
    for s in samples:
        s.reward = 0.1 + 0.2
    for name in ("grpo", "rloo", "opo"):
        found = compute_advantages(rollout_batch(samples), options(advantage_estimator=name))
        assert float(found.advantages.abs().max()) < 1e-9, name


def test_a_long_response_is_summed_exactly() -> None:
    (sample,) = random_samples(2, groups=(1,))
    rng, length = np.random.default_rng(0), 4097
    sample.mask = np.ones(length, bool)
    sample.values = rng.normal(size=length)
    sample.old = rng.normal(size=length)
    sample.reference = rng.normal(size=length)
    o = options(advantage_estimator="ppo", gamma=0.999, lambd=0.95, kl_coef=0.1)
    found = compute_advantages(rollout_batch([sample]), o)
    steps = steps_of(sample, o, sample.reward)
    running = 0.0
    wanted = np.zeros(length)
    for t in reversed(range(length)):
        after = sample.values[t + 1] if t + 1 < length else 0.0
        running = steps[t][1] + o.gamma * after - sample.values[t] + o.gamma * o.lambd * running
        wanted[t] = running
    np.testing.assert_allclose(found.advantages.numpy(), wanted, rtol=0, atol=1e-9)


def test_the_overlong_penalty_is_daposs() -> None:
    """Yu et al. 2025, eq. 13, with L_max = 20 and L_cache = 5."""
    o = options(rollout_max_response_len=20, overlong_buffer_len=5, overlong_penalty_factor=2.0)
    for length in range(25):
        wanted = 0.0 if length <= 15 else -1.0 if length > 20 else ((20 - 5) - length) / 5
        assert float(overlong_penalty(torch.tensor([length]), o)) == pytest.approx(-2.0 * wanted), length
    samples = random_samples(4)
    o = options(rollout_max_response_len=16, overlong_buffer_len=8, disable_grpo_std_normalization=True)
    found = compute_advantages(rollout_batch(samples), o)
    for s in samples:
        s.reward -= min(max(s.length - 8, 0) / 8, 1)
    wanted, _ = reference(samples, options(disable_grpo_std_normalization=True))
    np.testing.assert_allclose(found.advantages.numpy(), wanted, rtol=0, atol=1e-9)


def by_rank(batch: RolloutBatch, o: Options) -> Advantages:
    """An own estimator: the rank of the reward in its group, less the KL."""
    better = (batch.reward[:, None] > batch.reward) & (batch.group[:, None] == batch.group)
    return Advantages(batch.to_tokens(better.sum(1).double()) - batch.kl_penalty)


def of_samples(batch: RolloutBatch, o: Options) -> Advantages:
    return Advantages(batch.reward)


def test_an_own_estimator_by_path() -> None:
    samples = random_samples(6)
    o = options(advantage_estimator=f"{__name__}.by_rank", kl_coef=0.5)
    found = compute_advantages(rollout_batch(samples), o).advantages.tolist()
    wanted = []
    for s in samples:
        rank = sum(s.reward > x.reward for x in group_of(samples, s))
        wanted += [rank - 0.5 * k if m else 0.0 for k, m in zip(kl_of(s, "k1"), s.mask, strict=True)]
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("case", "without", "error", "message"),
    [
        ({"advantage_estimator": "ppo"}, {"values": None}, UsageError, "ppo needs the values"),
        ({"kl_coef": 0.1}, {"reference": None}, UsageError, "give --ref-load"),
        ({"use_opd": True}, {"teacher": None}, UsageError, "old policy and teacher"),
        ({"advantage_estimator": "remax"}, {"baseline": None}, DataError, "reward of a greedy"),
        ({"advantage_estimator": "grppo"}, {}, UsageError, "unknown; known: cispo, grpo, "),
        ({"advantage_estimator": f"{__name__}.absent"}, {}, UsageError, "has no absent"),
        ({"advantage_estimator": "absent_module.f"}, {}, UsageError, "cannot be imported"),
        ({"advantage_estimator": f"{__name__}.of_samples"}, {}, HpcrlError, r"advantages of shape \(13,\) for"),
        ({"advantage_estimator": f"{__name__}.SEEDS"}, {}, UsageError, "is not a function"),
    ],
    ids=str,
)
def test_what_is_lacking_is_said(case: dict[str, Any], without: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        compute_advantages(rollout_batch(random_samples(0), **without), options(**case))
