"""The numbers of an evaluation: pure functions of rewards, answers and lengths.

Invariant: responses to one prompt are not independent of one another, and nothing here takes them to be: an interval
counts prompts, and pass@k and the majority are means over prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcrl.rollout.answers.boxed import boxed
from hpcrl.rollout.grading.tally import grading_metrics
from hpcrl.sample import TRUNCATED, Sample

Z = 1.959964  #: the normal distribution's 97.5 % point, for intervals of 95 %
RIGHT = 1.0  #: a response with this reward, or more, passes (slime: exactly this)


def results(samples: Sequence[Sample], each: int, passrate: bool = False, dropped: int = 0) -> dict[str, Any]:
    """What is logged of a set.  samples: `each` responses to every prompt, those to one prompt one after another.

    accuracy: mean reward, ci_low and ci_high: its interval of 95 % (`interval`); response_len: mean tokens;
    truncated_ratio;
    n: responses; dropped: prompts that were too long; majority@n: mean reward of the answer that most of a prompt's
    `each` responses give, where any is boxed; pass@k, with `passrate`; and `grading_metrics`.
    """
    rewards = np.asarray([s.reward for s in samples], np.float64).reshape(-1, each)
    low, high = interval(rewards)
    found: dict[str, Any] = grading_metrics(samples) | {
        "accuracy": float(rewards.mean()),
        "ci_low": low,
        "ci_high": high,
        "response_len": float(np.mean([s.response_length for s in samples])),
        "truncated_ratio": float(np.mean([s.status == TRUNCATED for s in samples])),
        "n": len(samples),
    }
    if dropped:
        found["dropped"] = dropped
    if each > 1 and (voted := majority(samples, rewards)) is not None:
        found[f"majority@{each}"] = voted
    return found | (pass_rates(rewards) if passrate and each > 1 else {})


def answered_by(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Which policies have answered where new weights may have come meanwhile.

    policy_version: the one that is evaluated, `version`; policy_version_max: the newest that has sampled a token;
    policy_version_ratio: the share of the tokens that `version` itself has sampled.
    """
    versions = np.concatenate([sample.versions for sample in samples])
    share = float(np.mean(versions == version)) if len(versions) else 1.0
    return {
        "policy_version": float(version),
        "policy_version_max": float(versions.max(initial=version)),
        "policy_version_ratio": share,
    }


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that of k responses, drawn without replacement from n of which c are right, one at least is right.

    1 - C(n - c, k) / C(n, k): the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374), as a product, so that
    nothing overflows.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} right among {n}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def pass_rates(rewards: np.ndarray) -> dict[str, float]:
    """pass@k for k = 1, 2, 4 ... and all.  rewards: float64 [prompts, responses]."""
    n = rewards.shape[1]
    right = (rewards >= RIGHT).sum(axis=1).tolist()
    ks = sorted({*(2**i for i in range(n.bit_length())), n})
    return {f"pass@{k}": math.fsum(pass_at_k(n, c, k) for c in right) / len(right) for k in ks}


def majority(samples: Sequence[Sample], rewards: np.ndarray) -> float | None:
    """The mean over prompts of the reward of the answer that most responses give; None where no response is boxed.

    An answer is the content of the last box, white space aside; two spellings of one number are two answers.  Of two
    answers with as many votes the one that came first counts.  A prompt without an answer counts 0.
    """
    answers = [_answer(sample.response) for sample in samples]
    if not any(answers):
        return None
    each = rewards.shape[1]
    total = 0.0
    for row, mine in enumerate(rewards):
        given = answers[row * each : (row + 1) * each]
        votes = Counter(answer for answer in given if answer)
        if votes:
            total += float(mine[given.index(votes.most_common(1)[0][0])])
    return total / len(rewards)


def _answer(response: str) -> str:
    return "".join((boxed(response) or "").split())


def interval(rewards: np.ndarray) -> tuple[float, float]:
    """The interval of 95 % of the mean reward.  rewards: float64 [prompts, responses].

    Rewards in [0, 1]: Wilson's interval, for as many independent responses as have the variance that is seen between
    the prompts' means, at least one a prompt and at most all.  Others: the mean and 1.96 standard errors of the
    prompts' means, NaN for one prompt.
    """
    prompts, each = rewards.shape
    mean = float(rewards.mean())
    means = rewards.mean(axis=1)
    square = float(means.var(ddof=1)) / prompts if prompts > 1 else math.nan
    if rewards.min() < 0 or rewards.max() > 1:
        half = Z * math.sqrt(square)
        return mean - half, mean + half
    spread = mean * (1 - mean)
    if prompts == 1 or spread == 0:  # nothing is seen of how prompts differ
        return wilson(mean, prompts)
    return wilson(mean, min(max(spread / square if square else math.inf, prompts), prompts * each))


def wilson(share: float, count: float) -> tuple[float, float]:
    """Wilson's interval of 95 % for a share that was seen in `count` independent tries (Wilson 1927)."""
    square = Z * Z / count
    middle = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)
