"""Held-out accuracy: responses to prompts that are never trained on, and the numbers that are made of them.

Invariants: the seed of every response depends on the set, the line and the index alone, so evaluating the same weights
again gives the same numbers; nothing of an evaluation reaches the trainer's data.  Responses to one prompt are not
independent of one another, and no number takes them to be: an interval counts prompts, and pass@k and the majority are
means over prompts.

The caller of `Evaluator.samples` decides what else happens meanwhile: the synchronous loop waits for it.  A loop that
continues sampling may await it as a task next to its own, as long as no weights are published before it is done
(`version` is checked).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcrl.config.eval_sets import EvalSet, eval_sets
from hpcrl.config.options import Options
from hpcrl.rollout.answers.labels import boxed
from hpcrl.rollout.engines.completion import Sampling
from hpcrl.rollout.grading.service import GradedBy, grading_metrics
from hpcrl.rollout.prompts.prompt_files import PromptFile, read_prompts
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.prompts.row_checks import Keys
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.sampler import HeldOutSet, ResponseRequest, Sampler
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import TRUNCATED


@dataclass(frozen=True)
class HeldOut:
    """One held-out set, read."""

    eval_set: EvalSet
    file: PromptFile

    @property
    def name(self) -> str:
        return self.eval_set.name

    def results(self, samples: list[Sample], passrate: bool) -> dict[str, Any]:
        """What is logged of its responses."""
        return results(samples, self.eval_set.n_samples, passrate, self.file.dropped)


def read_held_out(options: Options, tokenizer: Tokenizer) -> list[HeldOut]:
    """The sets of --eval-prompt-data or --eval-config.  UsageError and DataError say what is wrong with one."""
    return [
        HeldOut(
            held,
            read_prompts(held.word, Keys.of_set(held), tokenizer.given(held.apply_chat_template_kwargs)),
        )
        for held in eval_sets(options)
    ]


def sampling_of(held: EvalSet, options: Options, tokenizer: Tokenizer) -> Sampling:
    """How a set is sampled.  The model's end-of-sequence ids always stop."""
    return replace(
        Sampling.from_options(options, tokenizer, evaluation=True),
        temperature=held.temperature,
        max_tokens=held.max_response_len,
        top_p=held.top_p,
        top_k=held.top_k,
        min_p=held.min_p,
        min_tokens=held.min_new_tokens,
        repetition_penalty=held.repetition_penalty,
        stop=held.stop,
        stop_token_ids=tuple(sorted({*held.stop_token_ids, *tokenizer.eos_ids})),
        skip_special_tokens=held.skip_special_tokens,
    )


class Evaluator:
    """Evaluates the engines' current weights."""

    def __init__(self, options: Options, tokenizer: Tokenizer, sampler: Sampler) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._sampler = sampler

    async def samples(self, held: HeldOut, version: int) -> list[Sample]:
        """The graded responses to every prompt of a set, in the order of the file."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.one(held, asked)) for asked in self.request_responses(held, version)]
        return [task.result() for task in running]

    def request_responses(self, held: HeldOut, version: int) -> Iterator[ResponseRequest]:
        """Every response that a set wants, in the order of the file."""
        each = held.eval_set.n_samples
        by = GradedBy(held.eval_set.rewards, held.eval_set.own_types, held.eval_set.reward_key)
        sampling = sampling_of(held.eval_set, self._options, self._tokenizer)
        whole = HeldOutSet(held.name, len(held.file) * each, each, sampling, by)
        for number, prompt in enumerate(held.file.prompts):
            for index in range(each):
                yield ResponseRequest(Group(number, prompt), index, -1, version, whole)

    async def one(self, held: HeldOut, asked: ResponseRequest) -> Sample:
        """A graded response of a set."""
        assert asked.held_out is not None
        sampling = asked.held_out.sampling
        if (context := held.eval_set.max_context_len) is not None:
            left = context - len(asked.group.prompt.tokens)
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, left))
        found = await self._sampler.make(replace(asked, held_out=replace(asked.held_out, sampling=sampling)))
        if len(found) == 1:
            return found[0]
        return found[-1].replace(reward=float(np.mean([sample.score for sample in found])))


# ---- results

Z = 1.959964  #: the normal distribution's 97.5 % point, for intervals of 95 %
RIGHT = 1.0  #: a response with this reward, or more, passes (slime: exactly this)


def results(samples: Sequence[Sample], each: int, passrate: bool = False, dropped: int = 0) -> dict[str, Any]:
    """What is logged of a set.

    accuracy: mean reward; right_or_wrong: 1 if every reward was 0 or 1, else 0; ci_low and ci_high: the mean's interval
    of 95 % (`interval`); response_len: mean tokens; truncated_ratio; n: responses.

    Args:
        samples: `each` responses to every prompt, those to one prompt one after another.
        dropped: prompts that were too long; majority@n: mean reward of the answer that most of a prompt's `each`
            responses give, where any is boxed; pass@k, with `passrate`; and `grading_metrics`.
    """
    rewards = np.asarray([s.score for s in samples], np.float64).reshape(-1, each)
    bounds = dict(zip(("ci_low", "ci_high"), interval(rewards), strict=True))
    found: dict[str, Any] = (
        grading_metrics(samples)
        | bounds
        | {
            "accuracy": float(rewards.mean()),
            "right_or_wrong": float(np.isin(rewards, (0, 1)).all()),
            "response_len": float(np.mean([s.response_length for s in samples])),
            "truncated_ratio": float(np.mean([s.status == TRUNCATED for s in samples])),
            "n": len(samples),
        }
    )
    found |= {"dropped": dropped} if dropped else {}
    if each > 1 and (voted := majority(samples, rewards)) is not None:
        found[f"majority@{each}"] = voted
    return found | (pass_rates(rewards) if passrate and each > 1 else {})


def answered_by(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Which policies have answered where new weights may have come meanwhile.

    policy_version: the one that is evaluated, `version`; policy_version_max: the newest that has sampled a token;
    policy_version_ratio: the share of the tokens that `version` itself has sampled.
    """
    versions = np.concatenate([sample.array("versions") for sample in samples])
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
    """pass@k for k = 1, 2, 4 ... and all.

    Args:
        rewards: float64 [prompts, responses].
    """
    n = rewards.shape[1]
    right = (rewards >= RIGHT).sum(axis=1).tolist()
    ks = sorted({*(2**i for i in range(n.bit_length())), n})
    return {f"pass@{k}": math.fsum(pass_at_k(n, c, k) for c in right) / len(right) for k in ks}


def majority(samples: Sequence[Sample], rewards: np.ndarray) -> float | None:
    """The mean over prompts of the reward of the answer that most responses give; None where no response is boxed.

    An answer is the content of the last box, white space aside; two spellings of one number are two answers.  Of two
    answers with as many votes the one that came first counts.  A prompt without an answer counts 0.
    """
    answers = ["".join((boxed(sample.response) or "").split()) for sample in samples]
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


def interval(rewards: np.ndarray) -> tuple[float, float]:
    """The interval of 95 % of the mean reward.

    Rewards in [0, 1]: Wilson's interval, for as many independent responses as have the variance that is seen between
    the prompts' means, at least one a prompt and at most all. Others: the mean and 1.96 standard errors of the prompts'
    means, NaN for one prompt.

    Args:
        rewards: float64 [prompts, responses].
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
