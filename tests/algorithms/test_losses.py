"""Every loss, KL estimator and correction against its paper's formula, written out in float64; value, gradient and
report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hpcrl.algorithms.interface import Correction, Loss, Report, Terms, TokenBatch, find, ratio_of
from hpcrl.algorithms.loss import (
    DIFFERENCE,
    compute_loss,
    compute_value_loss,
    divides_by_tokens,
    policy_token_weights,
    token_weights,
)
from hpcrl.config.options import Options
from hpcrl.config.plugin_names import algorithm_files
from hpcrl.errors import DataError, HpcrlError, UsageError
from tests.algorithms.batches import Sample, columns, options, over_ranks, random_samples, token_batch

SEEDS = range(8)
Row = list[float]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


# ---- the references: of one sample, lists of its trained tokens.  p: log-probs that carry the gradient; sg: the same,
# held fixed


class One:
    """The trained tokens of a sample as lists."""

    def __init__(self, sample: Sample, p: Row, sg: Row) -> None:
        self.p = p
        self.sg = sg
        columns = ("old", "trainer", "rollout", "reference", "entropy", "advantages")
        if "trained" not in vars(sample):  # once: the slopes below ask for it a hundred times
            vars(sample)["trained"] = {name: getattr(sample, name)[sample.mask].tolist() for name in columns}
        vars(self).update(vars(sample)["trained"])


def bounds(o: Options) -> tuple[float, float]:
    return o.eps_clip, o.eps_clip if o.eps_clip_high is None else o.eps_clip_high


def clipped(ratio: float, advantage: float, o: Options) -> tuple[float, float]:
    low, high = bounds(o)
    plain = ratio * advantage
    bounded = clip(ratio, 1 - low, 1 + high) * advantage
    gain = min(plain, bounded)
    if o.eps_clip_c is not None and advantage < 0:
        gain = max(gain, o.eps_clip_c * advantage)
    return -gain, float(bounded < plain)


def ppo(one: One, o: Options) -> list[tuple[float, float]]:
    return [clipped(math.exp(p - q), a, o) for p, q, a in zip(one.p, one.old, one.advantages, strict=True)]


def gspo(one: One, o: Options) -> list[tuple[float, float]]:
    ratio = math.exp(mean([p - q for p, q in zip(one.p, one.old, strict=True)]))
    return [clipped(ratio, a, o) for a in one.advantages]


def cispo(one: One, o: Options) -> list[tuple[float, float]]:
    (low, high), found = bounds(o), []
    for p, sg, q, a in zip(one.p, one.sg, one.old, one.advantages, strict=True):
        ratio = math.exp(sg - q)
        found.append((-clip(ratio, 1 - low, 1 + high) * a * p, float(not 1 - low <= ratio <= 1 + high)))
    return found


def reinforce(one: One, o: Options) -> list[tuple[float, float]]:
    return [(-a * p, 0.0) for p, a in zip(one.p, one.advantages, strict=True)]


def sapo(one: One, o: Options) -> list[tuple[float, float]]:
    found = []
    for p, q, a in zip(one.p, one.old, one.advantages, strict=True):
        tau = o.sapo_tau_pos if a > 0 else o.sapo_tau_neg
        found.append((-a * 4 / tau / (1 + math.exp(-tau * (math.exp(p - q) - 1))), 0.0))
    return found


def gmpo(one: One, o: Options) -> list[tuple[float, float]]:
    """The paper's product of min(r^s, clip(r)^s)^s with s the advantage's sign, to the power of 1 / length, times A."""
    low, high = math.exp(-bounds(o)[0]), math.exp(bounds(o)[1])
    logs: list[tuple[float, float]] = []
    for p, q, a in zip(one.p, one.old, one.advantages, strict=True):
        sign, ratio = (1 if a > 0 else -1), math.exp(p - q)
        kept = min(ratio**sign, clip(ratio, low, high) ** sign) ** sign
        logs.append((math.log(kept), float(abs(kept - ratio) > 1e-12)))
    return [(-a * math.exp(mean([x for x, _ in logs])), cut) for a, (_, cut) in zip(one.advantages, logs, strict=True)]


LOSSES: dict[str, Callable[[One, Options], list[tuple[float, float]]]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "reinforce": reinforce,
    "sapo": sapo,
    "gmpo": gmpo,
}


def kl_terms(one: One, o: Options) -> Row:
    found = []
    for p, q, r in zip(one.p, one.old, one.reference, strict=True):
        d, ratio = p - r, math.exp(p - q)
        k3 = math.exp(-d) - 1 + d
        kl = {"k1": d, "k2": d * d / 2, "k3": k3, "low_var_kl": k3}[o.kl_loss_type]
        kl *= ratio if o.use_unbiased_kl else 1.0
        found.append(clip(kl, -10, 10) if o.kl_loss_type == "low_var_kl" else kl)
    return found


def correction(one: One, o: Options) -> tuple[Row, Row]:
    """(weights, kept) of each token."""
    count = len(one.p)
    if not o.use_tis:
        return [1.0] * count, [1.0] * count
    logs = [t - e for t, e in zip(one.trainer, one.rollout, strict=True)]
    level = {"token": logs, "sequence": [math.fsum(logs)] * count, "geometric": [mean(logs)] * count}
    low, high = o.tis_clip_low, o.tis_clip
    which = o.custom_tis_function_path or "tis"
    ratio = [math.exp(clip(x, -20, 20)) for x in level[o.tis_level if which == "mis" else "token"]]
    if which == "icepop":
        return [k if low <= k <= high else 0.0 for k in ratio], [1.0] * count
    if which == "tis":
        return [clip(k, low, high) for k in ratio], [1.0] * count
    kept = [float(low <= k <= high) if o.tis_mode == "mask" else 1.0 for k in ratio]
    weights = {"truncate": [min(k, high) for k in ratio], "clip": [clip(k, low, high) for k in ratio], "mask": ratio}[
        o.tis_mode
    ]
    if o.use_rs:
        most = o.rs_upper_bound or high
        least = (low or 1 / high) if o.rs_lower_bound is None else o.rs_lower_bound
        kept = [k * (least <= math.exp(clip(x, -20, 20)) <= most) for k, x in zip(kept, level[o.rs_level], strict=True)]
    if o.use_rs and o.rs_veto_threshold is not None and any(math.exp(x) < o.rs_veto_threshold for x in logs):
        kept = [0.0] * count
    return weights, kept


def opsm(one: One, o: Options) -> Row:
    moved = mean([q - sg for q, sg in zip(one.old, one.sg, strict=True)]) > o.opsm_delta
    return [0.0 if o.use_opsm and a < 0 and moved else 1.0 for a in one.advantages]


def policy(
    ones: Sequence[One], o: Options, name: str, per_token: bool = False, divisor: float | None = None
) -> dict[str, float]:
    """The loss (not yet divided by samples or tokens) and its parts."""
    sums = dict.fromkeys(("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss", "kl_loss", "opsm_clipfrac"), 0.0)
    for one in ones:
        share = 1.0 if per_token else 1 / max(len(one.p), 1)
        weights, kept = correction(one, o)
        masks, kl = opsm(one, o), kl_terms(one, o)
        moved = [q - p for q, p in zip(one.old, one.p, strict=True)]
        drift = [mean(moved)] * len(moved) if name == "gspo" else moved
        for t, (loss, cut) in enumerate(LOSSES[name](one, o)):
            sums["pg_loss"] += loss * weights[t] * masks[t] * kept[t] * (share if divisor is None else 1 / divisor)
            sums["pg_clipfrac"] += cut * kept[t] * share
            sums["ppo_kl"] += drift[t] * kept[t] * share
            sums["entropy_loss"] += one.entropy[t] * kept[t] * share
            sums["kl_loss"] += kl[t] * kept[t] * share
            sums["opsm_clipfrac"] += (1 - masks[t]) * share
    sums["loss"] = sums["pg_loss"] - o.entropy_coef * sums["entropy_loss"] + o.kl_loss_coef * sums["kl_loss"]
    return sums


def ones_of(samples: Sequence[Sample], p: np.ndarray, sg: np.ndarray) -> list[One]:
    found, at = [], 0
    for s in samples:
        found.append(One(s, p[at : at + s.count].tolist(), sg[at : at + s.count].tolist()))
        at += s.count
    return found


def slopes(of: Callable[[np.ndarray], float], p: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """The gradient by central differences."""
    found = np.zeros_like(p)
    for i in range(len(p)):
        more, less = p.copy(), p.copy()
        more[i], less[i] = p[i] + step, p[i] - step
        found[i] = (of(more) - of(less)) / (2 * step)
    return found


def leaf(samples: Sequence[Sample]) -> torch.Tensor:
    return columns(samples, "logprobs")[columns(samples, "mask").bool()].clone().requires_grad_()


POLICY: list[dict[str, Any]] = [
    {},
    {"eps_clip": 0.1, "eps_clip_high": 0.28},
    {"eps_clip_c": 1.3},
    {"pg_loss_type": "gspo", "eps_clip": 0.03, "eps_clip_high": 0.05},
    {"advantage_estimator": "gspo", "eps_clip": 0.03, "eps_clip_c": 1.2},
    {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.3},
    {"pg_loss_type": "cispo", "eps_clip": 0.2, "eps_clip_high": 0.3},
    {"pg_loss_type": "reinforce"},
    {"pg_loss_type": "sapo"},
    {"pg_loss_type": "sapo", "sapo_tau_pos": 0.5, "sapo_tau_neg": 3.0},
    {"pg_loss_type": "gmpo", "eps_clip": 0.4},
    {"pg_loss_type": "gmpo", "eps_clip": 0.1, "eps_clip_high": 0.2, "entropy_coef": 0.01},
    {"entropy_coef": 0.02},
    *({"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": kind} for kind in ("k1", "k2", "k3", "low_var_kl")),
    *(
        {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": kind, "use_unbiased_kl": True}
        for kind in ("k1", "k2", "k3", "low_var_kl")
    ),
    {"use_kl_loss": True, "kl_loss_type": "k2"},
    {"use_tis": True},
    {"use_tis": True, "tis_clip": 1.1, "tis_clip_low": 0.8},
    {"use_tis": True, "custom_tis_function_path": "icepop", "tis_clip": 1.5, "tis_clip_low": 0.6},
    *(
        {"tis_mode": mode, "tis_level": level, "tis_clip": 1.3, "tis_clip_low": 0.7}
        for mode in ("truncate", "clip", "mask")
        for level in ("token", "sequence", "geometric")
    ),
    {
        "use_rs": True,
        "rs_level": "token",
        "rs_upper_bound": 1.4,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "k3",
    },
    {"use_rs": True, "rs_level": "sequence", "rs_lower_bound": 0.5, "entropy_coef": 0.1},
    {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.1, "tis_mode": "mask"},
    {"use_rs": True, "tis_clip": 1.5, "tis_clip_low": 0.8},
    {"use_rs": True, "rs_veto_threshold": 0.5, "tis_level": "sequence"},
    {"use_rs": True, "rs_upper_bound": 1.2, "advantage_estimator": "gspo", "eps_clip": 0.05},
    {"use_opsm": True},
    {"use_opsm": True, "opsm_delta": 0.2, "pg_loss_type": "sapo", "use_tis": True},
]
POLICY = [
    case
    | (
        {"use_tis": True, "custom_tis_function_path": "mis"}
        if {"tis_mode", "use_rs", "rs_veto_threshold"} & {*case}
        else {}
    )
    for case in POLICY
]


def label(case: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in case.items()) or "default"


def name_of(o: Options) -> str:
    return o.pg_loss_type or {"gspo": "gspo", "cispo": "cispo"}.get(o.advantage_estimator, "ppo")


@pytest.mark.parametrize("case", POLICY, ids=label)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 2))])
def test_it_is_the_formula(case: dict[str, Any], seed: int) -> None:
    samples, o = random_samples(seed), options(**case)
    p = leaf(samples)
    found = compute_loss(token_batch(samples, p), o)
    (gradient,) = torch.autograd.grad(found.total, p)
    at = p.detach().numpy()
    wanted = policy(ones_of(samples, at, at), o, name_of(o))
    assert float(found.total.detach()) == pytest.approx(wanted["loss"], abs=1e-6)
    reported = {name: float(value) for name, value in found.report.means.items()}
    absent = {"kl_loss": not o.use_kl_loss, "opsm_clipfrac": not o.use_opsm}
    for name, value in wanted.items():
        assert (name in reported) != absent.get(name, False), name
        if name in reported:
            assert reported[name] == pytest.approx(value, abs=1e-6), name
    numeric = slopes(lambda q: policy(ones_of(samples, q, at), o, name_of(o))["loss"], at)
    np.testing.assert_allclose(gradient.numpy(), numeric, rtol=0, atol=1e-6)


def test_every_loss_correction_and_kl_is_tested() -> None:
    chosen = [options(**case) for case in POLICY]
    assert {name_of(o) for o in chosen} == set(algorithm_files("losses"))
    assert {o.custom_tis_function_path or "tis" for o in chosen if o.use_tis} == set(algorithm_files("corrections"))
    assert {o.kl_loss_type for o in chosen if o.use_kl_loss} == set(algorithm_files("kl"))


def test_entropy_has_its_gradient() -> None:
    samples = random_samples(0)
    tokens = token_batch(samples)
    entropy = tokens.entropy.clone().requires_grad_()
    found = compute_loss(replace(tokens, entropy=entropy), options(entropy_coef=0.25))
    (gradient,) = torch.autograd.grad(found.total, entropy)
    torch.testing.assert_close(gradient, -0.25 * tokens.weights)


def test_the_kl_to_a_teacher_is_a_term_like_others() -> None:
    samples = random_samples(0)
    tokens = token_batch(samples)
    divergence = torch.rand(len(tokens.weights), dtype=torch.float64).requires_grad_()
    for coefficient in (0.4, 0.0):
        o = options(use_opd=True, opd_kl_type="forward", opd_kl_coef=coefficient)
        found = compute_loss(
            replace(tokens, logprobs=tokens.logprobs.clone().requires_grad_(), divergence=divergence), o
        )
        (gradient,) = torch.autograd.grad(found.total, divergence, allow_unused=True)
        torch.testing.assert_close(
            torch.zeros_like(divergence) if gradient is None else gradient, coefficient * tokens.weights
        )
        wanted = float((divergence * tokens.weights).sum().detach())
        assert float(found.report.means["opd_forward_kl"]) == pytest.approx(wanted)


def test_the_low_variance_kl_is_bounded() -> None:
    samples = random_samples(0)
    tokens = token_batch(samples)
    trained = sum(s.count > 0 for s in samples)
    for reference, old, more in (
        (tokens.logprobs + 30, tokens.old, {}),
        (tokens.logprobs + 2, tokens.logprobs - 3, {"use_unbiased_kl": True}),  # each factor is below the bound
    ):
        o = options(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="low_var_kl", **more)
        found = compute_loss(replace(tokens, reference=reference, old=old), o).report.means["kl_loss"]
        assert float(found) == pytest.approx(10 * trained), more


# ---- reducers


@pytest.mark.parametrize("reduction", ["sample", "token", "constant", "custom"])
@pytest.mark.parametrize("seed", SEEDS)
def test_reducers(reduction: str, seed: int) -> None:
    samples = random_samples(seed)
    case = {"use_kl_loss": True, "kl_loss_coef": 0.2, "entropy_coef": 0.1}
    case |= {
        "sample": {},
        "token": {"calculate_per_token_loss": True},
        "constant": {"pg_loss_divisor": 7},
        "custom": {"custom_pg_loss_reducer_function_path": f"{__name__}.over_seven"},
    }[reduction]
    o = options(**case)
    tokens = token_batch(samples)
    counts = torch.tensor([s.count for s in samples])
    special = policy_token_weights(counts, o)
    assert (special is None) == (reduction in ("sample", "token"))
    assert divides_by_tokens(o) == (reduction == "token")
    tokens = replace(
        tokens,
        weights=token_weights(counts, o).double()[tokens.sample],
        pg_weights=None if special is None else special.double()[tokens.sample],
    )
    at = tokens.logprobs.numpy()
    wanted = policy(ones_of(samples, at, at), o, "ppo", reduction == "token", 7.0 if special is not None else None)
    assert float(compute_loss(tokens, o).total) == pytest.approx(wanted["loss"], rel=1e-6, abs=1e-6)


def over_seven(counts: torch.Tensor, o: Options) -> torch.Tensor:
    return torch.full(counts.shape, 1 / 7)


def one_weight(counts: torch.Tensor, o: Options) -> torch.Tensor:
    return torch.ones(())


def test_an_own_reducer_gives_one_weight_a_sample() -> None:
    with pytest.raises(HpcrlError, match="one_weight returns no tensor of 2 weights"):
        policy_token_weights(
            torch.tensor([1, 2]), options(custom_pg_loss_reducer_function_path=f"{__name__}.one_weight")
        )


# ---- what is measured


@pytest.mark.parametrize("seed", SEEDS)
def test_trainer_engine_mismatch_is_measured(seed: int) -> None:
    """The mismatch between trainer and engine is always measured."""
    samples, o = random_samples(seed), options()
    report = compute_loss(token_batch(samples), o).report
    wanted: dict[str, float] = {}
    differences = []
    for s in samples:
        one = One(s, [0.0] * s.count, [0.0] * s.count)
        logs = [t - e for t, e in zip(one.trainer, one.rollout, strict=True)]
        differences += [abs(x) for x in logs]
        if not logs:
            continue
        log_ppl, engine = -mean(one.trainer), -mean(one.rollout)
        of_sample = {
            "mis_kl": mean([-x for x in logs]),
            "mis_k3_kl": mean([math.exp(x) - 1 - x for x in logs]),
            "mis_training_ppl": math.exp(log_ppl),
            "mis_rollout_ppl": math.exp(engine),
            "mis_training_log_ppl": log_ppl,
            "mis_rollout_log_ppl": engine,
            "mis_log_ppl_diff": log_ppl - engine,
            "mis_log_ppl_abs_diff": abs(log_ppl - engine),
            "mis_ppl_ratio": math.exp(log_ppl) / math.exp(engine),
            "tis": mean([math.exp(x) for x in logs]),
            "tis_abs": mean([abs(math.exp(x) - 1) for x in logs]),
            "tis_clipfrac": mean([float(math.exp(x) > 2) for x in logs]),
        }
        for name, value in of_sample.items():
            wanted[name] = wanted.get(name, 0.0) + value
    trained = sum(s.count > 0 for s in samples)
    for name, value in wanted.items():
        if name.startswith("mis_"):
            assert mean_of(report, name) == pytest.approx(value / trained, abs=1e-6), name
        else:
            assert float(report.means[name]) == pytest.approx(value, abs=1e-6), name
    assert mean_of(report, DIFFERENCE) == pytest.approx(mean(differences))
    assert float(report.maxima["train_rollout_logprob_abs_diff_max"]) == pytest.approx(max(differences))
    apart = compute_loss(replace(token_batch(samples), comparable=False), o).report
    assert apart.means == report.means, "what a correction does, or would do, is of interest in every loop"
    assert not apart.counted
    assert not apart.maxima


def mean_of(report: Report, name: str) -> float:
    """A mean that has a count of its own."""
    total, count = report.counted[name]
    return float(total) / float(count)


@pytest.mark.parametrize("seed", SEEDS)
def test_stale_tokens_are_not_compared(seed: int) -> None:
    """What is reported of the difference between trainer and engine is of fresh tokens alone, whatever their share."""
    samples = random_samples(seed)
    tokens = token_batch(samples)
    fresh = torch.from_numpy(np.random.default_rng(seed).random(len(tokens.sample)) < 0.3)
    fresh[0] = True
    assert tokens.rollout is not None
    older = replace(tokens, fresh=fresh, rollout=tokens.rollout.where(fresh, tokens.rollout - 5.0))
    found = compute_loss(older, options()).report
    alone = compute_loss(parts_of(tokens, fresh), options()).report
    assert set(found.counted) == set(alone.counted) and len(found.counted) == 10
    for name in alone.counted:
        assert mean_of(found, name) == pytest.approx(mean_of(alone, name), abs=1e-9), name
    assert {name: float(value) for name, value in found.maxima.items()} == alone.maxima
    none = compute_loss(replace(older, fresh=torch.zeros_like(fresh)), options()).report
    assert not any(float(count) for _, count in none.counted.values())
    assert set(map(float, none.maxima.values())) == {-math.inf}


def test_corrected_share_is_reported() -> None:
    """The share of tokens that a correction changes is reported."""
    samples = random_samples(1)
    tokens = token_batch(samples)
    ratio = (tokens.trainer - tokens.rollout).exp()
    weights = tokens.weights
    o = options(use_tis=True, tis_clip=1.2, tis_clip_low=0.9)
    report = compute_loss(tokens, o).report.means
    assert float(report["tis_clipfrac"]) == pytest.approx(float((((ratio > 1.2) | (ratio < 0.9)) * weights).sum()))
    assert float(report["ois"]) == pytest.approx(float(((tokens.logprobs - tokens.old).exp() * weights).sum()))
    whole = tokens.sample_means(tokens.logprobs - tokens.old)[0].exp()
    report = compute_loss(tokens, options(advantage_estimator="gspo")).report.means
    assert float(report["ois"]) == pytest.approx(float((whole * weights).sum())), "of responses, as the loss"
    o = options(use_tis=True, custom_tis_function_path="mis", use_rs=True, rs_lower_bound=0.8, rs_upper_bound=1.1)
    report = compute_loss(tokens, o).report.means
    assert float(report["rs_mask_fraction_low"]) == pytest.approx(float(((ratio < 0.8) * weights).sum()))
    assert float(report["rs_mask_fraction_high"]) == pytest.approx(float(((ratio > 1.1) * weights).sum()))


@pytest.mark.parametrize("case", POLICY, ids=label)
def test_no_tokens_are_no_loss_and_the_same_names(case: dict[str, Any]) -> None:
    """A context-parallel rank may hold none of a micro-batch's trained tokens; it must report the same names."""
    samples, o = random_samples(0), options(**case)
    full = compute_loss(token_batch(samples), o).report
    for s in samples:
        s.mask[:] = False
    p = leaf(samples)
    found = compute_loss(token_batch(samples, p), o)
    assert float(found.total.detach()) == 0.0
    found.total.backward()
    for part in ("means", "counted", "maxima"):
        assert list(getattr(found.report, part)) == list(getattr(full, part))
    assert not any(float(value) for value in found.report.means.values())
    assert not any(float(part) for pair in found.report.counted.values() for part in pair)
    assert set(map(float, found.report.maxima.values())) == {-math.inf}


# ---- layouts


def parts_of(tokens: TokenBatch, keep: torch.Tensor, **more: Any) -> TokenBatch:
    """The tokens where `keep` is, as another rank or micro-batch has them."""
    names = (
        "logprobs",
        "entropy",
        "greedy",
        "sample",
        "weights",
        "old",
        "trainer",
        "rollout",
        "advantages",
        "reference",
    )
    return replace(tokens, **{name: getattr(tokens, name)[keep] for name in names}, **more)


@pytest.mark.parametrize("case", [*POLICY, {"loss_type": "dpo_loss"}], ids=label)
def test_context_parallel_ranks_add_up(case: dict[str, Any]) -> None:
    """Tokens of each sample on three ranks, one of which may have none: loss, gradient and report are the same."""
    samples, o = random_samples(7, groups=(2,) * 6), options(**case)
    p = leaf(samples)
    whole = compute_loss(token_batch(samples, p), o)
    (wanted,) = torch.autograd.grad(whole.total, p)
    place = torch.from_numpy(np.random.default_rng(1).integers(0, 3, len(p)))

    def one(rank: int, total: Any) -> Loss:
        tokens = token_batch(samples, p)

        def over_sample(values: torch.Tensor) -> torch.Tensor:
            return total(values.new_zeros(len(values), len(samples)).index_add(1, mine.sample, values))

        mine = parts_of(tokens, place == rank, sum_over_sample=over_sample)
        return compute_loss(mine, o)

    found = over_ranks(one, 3)
    (gradient,) = torch.autograd.grad(sum(loss.total for loss in found), p)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-10)
    for name, value in whole.report.means.items():
        assert sum(float(loss.report.means[name]) for loss in found) == pytest.approx(float(value), abs=1e-9), name
    for name, pair in whole.report.counted.items():
        for k, value in enumerate(pair):
            assert sum(float(loss.report.counted[name][k]) for loss in found) == pytest.approx(float(value), abs=1e-9)
    for name, value in whole.report.maxima.items():
        assert max(float(loss.report.maxima[name]) for loss in found) == float(value)


@pytest.mark.parametrize("case", [*POLICY, {"loss_type": "dpo_loss"}, {"loss_type": "sft_loss"}], ids=label)
def test_micro_batches_add_up(case: dict[str, Any]) -> None:
    samples, o = random_samples(9, groups=(2,) * 5), options(**case)
    whole = compute_loss(token_batch(samples), o)
    parts = [compute_loss(token_batch(cut), o) for cut in (samples[:2], samples[2:8], samples[8:])]
    assert sum(float(part.total) for part in parts) == pytest.approx(float(whole.total), abs=1e-9)
    for name, value in whole.report.means.items():
        assert sum(float(part.report.means[name]) for part in parts) == pytest.approx(float(value), abs=1e-9), name


# ---- the other losses


@pytest.mark.parametrize("seed", SEEDS)
def test_sft_loss(seed: int) -> None:
    samples = random_samples(seed)
    p = leaf(samples)
    likeliest = torch.arange(len(p)) % 3 == 0
    tokens = token_batch(samples, p, greedy=likeliest)
    found = compute_loss(tokens, options(loss_type="sft_loss"))
    (gradient,) = torch.autograd.grad(found.total, p)
    ones = ones_of(samples, p.detach().numpy(), p.detach().numpy())
    assert float(found.total.detach()) == pytest.approx(-math.fsum(mean(one.p) for one in ones), abs=1e-9)
    torch.testing.assert_close(gradient, -tokens.weights)
    assert float(found.report.means["token_accuracy"]) == pytest.approx(float((likeliest * tokens.weights).sum()))


def dpo(samples: Sequence[Sample], ones: Sequence[One], beta: float) -> dict[str, float]:
    """Rafailov et al. 2023, eq. 7, of each pair; a pair counts once for each of its responses that has tokens."""
    found = dict.fromkeys(("loss", "dpo_accuracy", "dpo_margin", "dpo_chosen", "dpo_rejected", "dpo_ties"), 0.0)
    for one, other in zip(range(0, len(samples), 2), range(1, len(samples), 2), strict=True):
        times = (samples[one].count > 0) + (samples[other].count > 0)
        if samples[one].reward == samples[other].reward:
            found["dpo_ties"] += times
            continue
        best, worst = (one, other) if samples[one].reward > samples[other].reward else (other, one)
        good, bad = (
            beta * math.fsum(p - r for p, r in zip(ones[i].p, ones[i].reference, strict=True)) for i in (best, worst)
        )
        found["loss"] += times * math.log(1 + math.exp(bad - good))
        found["dpo_accuracy"] += times * (good > bad)
        found["dpo_margin"] += times * (good - bad)
        found["dpo_chosen"] += times * good
        found["dpo_rejected"] += times * bad
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_dpo_loss(seed: int) -> None:
    samples = random_samples(seed, groups=(2,) * 7)
    o = options(loss_type="dpo_loss", dpo_beta=0.3)
    p = leaf(samples)
    at = p.detach().numpy()
    found = compute_loss(token_batch(samples, p), o)
    (gradient,) = torch.autograd.grad(found.total, p)
    wanted = dpo(samples, ones_of(samples, at, at), 0.3)
    assert {name: float(value) for name, value in found.report.means.items()} == pytest.approx(wanted, abs=1e-6)
    numeric = slopes(lambda q: dpo(samples, ones_of(samples, q, at), 0.3)["loss"], at)
    np.testing.assert_allclose(gradient.numpy(), numeric, rtol=0, atol=1e-6)


@pytest.mark.parametrize("groups", [(1, 1), (3, 1), (2, 1), (4,)], ids=str)
def test_dpo_needs_whole_pairs(groups: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="pair in a micro-batch;.*--n-samples-per-prompt 2"):
        compute_loss(token_batch(random_samples(0, groups=groups)), options(loss_type="dpo_loss"))


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(seed: int) -> None:
    rng = np.random.default_rng(seed)
    old, returns, weights = rng.normal(size=(3, 40))
    at = old + 0.3 * rng.normal(size=40)

    def wanted(v: np.ndarray) -> float:
        near = old + np.clip(v - old, -0.2, 0.2)
        return float(np.sum(weights * np.maximum((v - returns) ** 2, (near - returns) ** 2)))

    values = torch.from_numpy(at).requires_grad_()
    found = compute_value_loss(values, *map(torch.from_numpy, (old, returns, weights)), options(value_clip=0.2))
    (gradient,) = torch.autograd.grad(found.total, values)
    assert float(found.total.detach()) == pytest.approx(wanted(at), abs=1e-6)
    np.testing.assert_allclose(gradient.numpy(), slopes(wanted, at), rtol=0, atol=1e-6)
    outside = float(np.sum(weights * (np.abs(at - old) > 0.2)))
    assert float(found.report.means["value_clipfrac"]) == pytest.approx(outside)


# ---- own functions, and what is lacking


def squared(tokens: TokenBatch, o: Options) -> Terms:
    return Terms(tokens.logprobs**2, torch.zeros_like(tokens.old))


def halved(tokens: TokenBatch, o: Options) -> Correction:
    return Correction(
        torch.full_like(tokens.old, 0.5), torch.ones_like(tokens.old), {"half": torch.ones_like(tokens.old)}
    )


def total_of_four(tokens: TokenBatch, o: Options) -> Loss:
    return Loss(4 * tokens.logprobs.sum(), Report())


def no_loss(tokens: TokenBatch, o: Options) -> torch.Tensor:
    return tokens.logprobs.sum()


def one_term(tokens: TokenBatch, o: Options) -> Terms:
    return Terms(tokens.logprobs.sum(), torch.zeros_like(tokens.old))


def test_own_functions_by_path() -> None:
    tokens = token_batch(random_samples(2))
    o = options(pg_loss_type=f"{__name__}.squared", use_tis=True, custom_tis_function_path=f"{__name__}.halved")
    found = compute_loss(tokens, o)
    assert float(found.total.detach()) == pytest.approx(float((0.5 * tokens.logprobs**2 * tokens.weights).sum()))
    assert float(found.report.means["half"]) == pytest.approx(float(tokens.weights.sum()))
    o = options(loss_type="custom_loss", custom_loss_function_path=f"{__name__}.total_of_four")
    assert float(compute_loss(tokens, o).total) == pytest.approx(4 * float(tokens.logprobs.sum()))


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ({"use_kl_loss": True}, UsageError, "--use-kl-loss needs .* reference.*; give --ref-load"),
        ({"loss_type": "dpo_loss"}, UsageError, "dpo_loss needs .* reference.*; give --ref-load"),
        ({"pg_loss_type": "pppo"}, UsageError, "--pg-loss-type pppo is unknown; known:"),
        ({"pg_loss_type": f"{__name__}.absent"}, UsageError, "has no absent"),
        (
            {"pg_loss_type": f"{__name__}.no_loss"},
            HpcrlError,
            r"--pg-loss-type .*no_loss returns no Terms of \d+ tokens",
        ),
        ({"pg_loss_type": f"{__name__}.one_term"}, HpcrlError, r"one_term returns no Terms of \d+ tokens"),
        (
            {"use_tis": True, "custom_tis_function_path": f"{__name__}.squared"},
            HpcrlError,
            r"--custom-tis-function-path .*squared returns no Correction of \d+ tokens",
        ),
        (
            {"loss_type": "custom_loss", "custom_loss_function_path": f"{__name__}.no_loss"},
            HpcrlError,
            "no_loss returns no Loss",
        ),
    ],
    ids=str,
)
def test_what_is_lacking_is_said(case: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        compute_loss(token_batch(random_samples(0, groups=(2, 2)), reference=None), options(**case))


def test_only_sampled_tokens_are_compared() -> None:
    """Only tokens that an engine sampled are compared with it."""
    tokens = token_batch(random_samples(0, groups=(2, 2)))
    assert not compute_loss(tokens, options(loss_type="sft_loss")).report.counted
    assert not compute_loss(tokens, options(loss_type="dpo_loss", rejected_key="worse")).report.counted
    wanted = float((tokens.trainer - tokens.rollout).abs().mean())
    report = compute_loss(tokens, options(loss_type="dpo_loss")).report
    assert list(report.counted) == [DIFFERENCE] and mean_of(report, DIFFERENCE) == pytest.approx(wanted)


# ---- log-ratios beyond what a number holds


FAR = (0.0, 60.0, 90.0, 200.0, 1e4, -90.0, -200.0, -1e4)


def far_batch(dtype: torch.dtype, advantage: float, far: Sequence[float] = FAR) -> tuple[TokenBatch, torch.Tensor]:
    """Two responses, the log-probs of the second moved by each of `far` from all that they are compared with."""
    near = torch.tensor([-0.5, -1.0, -0.25], dtype=dtype)
    p = torch.cat([near, torch.full((len(far),), -1.0, dtype=dtype)]).requires_grad_()
    other = torch.cat([near + 0.1, -1.0 - torch.tensor(far, dtype=dtype)])
    count = len(p)
    weights = torch.cat([torch.full((3,), 1 / 3), torch.full((len(far),), 1 / len(far))]).to(dtype)
    return TokenBatch(
        logprobs=p,
        entropy=torch.zeros(count, dtype=dtype),
        sample=torch.tensor([0] * 3 + [1] * len(far)),
        samples=2,
        weights=weights,
        old=other,
        trainer=other,
        rollout=2 * other - p.detach(),
        advantages=torch.cat([torch.full((3,), 0.5), torch.full((len(far),), advantage)]).to(dtype),
        reference=other,
    ), p


@pytest.mark.parametrize("case", POLICY, ids=label)
@pytest.mark.parametrize("advantage", [0.0, -1.0, 1.0])
def test_no_log_ratio_makes_a_gradient_nan(case: dict[str, Any], advantage: float) -> None:
    """Loss, gradient and report are finite in float32 whatever the log-ratios are, and a far token whose advantage is 0
    has no gradient but its KL's and leaves the others' as it is."""
    o = options(**case)
    for far in (FAR, *((x,) for x in FAR)):
        tokens, p = far_batch(torch.float32, advantage, far)
        found = compute_loss(tokens, o)
        (gradient,) = torch.autograd.grad(found.total, p)
        assert gradient.isfinite().all() and found.total.isfinite(), far
        assert all(value.isfinite() for value in found.report.means.values()), far
        if not advantage and not o.use_kl_loss:
            assert not gradient[3:].any(), far


@pytest.mark.parametrize("case", POLICY, ids=label)
def test_a_masked_token_has_no_part_in_a_gradient(case: dict[str, Any]) -> None:
    """A response that OPSM or rejection masks has gradient 0, and not NaN, however far it is."""
    o = options(**{**case, "use_opsm": True, "opsm_delta": 0.0, "use_kl_loss": False})
    tokens, p = far_batch(torch.float32, -1.0, (-90.0, -200.0, -3.0))
    (gradient,) = torch.autograd.grad(compute_loss(tokens, o).total, p)
    assert gradient[3:].tolist() == [0.0] * 3


@pytest.mark.parametrize("name", ["k3", "low_var_kl"])
def test_a_kl_is_as_before_below_the_bound(name: str) -> None:
    """Bit for bit the formula up to 40 nats in float32; held beyond 42.4."""
    d = torch.linspace(-40, 40, 501)
    ratio = torch.linspace(0.5, 2, 501)
    wanted = ratio * ((-d).exp() - 1 + d)
    kl = find("kl", name, "--kl-loss-type")
    assert torch.equal(kl(d, ratio), wanted.clamp(-10, 10) if name == "low_var_kl" else wanted)
    assert kl(torch.tensor([-1e4]), torch.ones(1)).isfinite().all()


def test_ratios_are_exp_below_the_bound() -> None:
    """Bit for bit, and so are their gradients; in float64 up to 352 nats."""
    for dtype, most in ((torch.float32, 42.3), (torch.float64, 352.8)):
        x = torch.linspace(-200, most, 1001, dtype=dtype).requires_grad_()
        found = ratio_of(x)
        assert torch.equal(found, x.exp())
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, x.exp())))
        beyond = torch.tensor([most + 1, 1e4, math.inf], dtype=dtype).requires_grad_()
        held = ratio_of(beyond)
        (gradient,) = torch.autograd.grad((held * held).sum(), beyond)
        assert (held * held).isfinite().all() and gradient.tolist() == [0.0, 0.0, 0.0]


def test_a_held_k3_has_no_gradient_of_the_wrong_sign() -> None:
    """Below the bound both of its terms are held: the linear one alone would push away from the reference."""
    from hpcrl.algorithms.kl import k3

    difference = torch.tensor([-60.0, -43.0, -42.0, -5.0, 3.0, 60.0], requires_grad=True)
    k3.kl(difference, torch.ones(6)).sum().backward()
    assert (
        difference.grad[:2].tolist() == [0, 0] and (difference.grad[2:4] < 0).all() and (difference.grad[4:] > 0).all()
    )
