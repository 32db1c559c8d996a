"""What a custom function returned: samples that can be trained on, or one clear error.

Invariant: a sample that leaves here has arrays that fit each other, tokens of the model, finite log-probs and a mask of
0 and 1.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from hpcrl.rollout.samplers.frames import Made, made
from hpcrl.sample import ABORTED, COMPLETED, PENDING, TRUNCATED, Sample

MOST = 256  #: samples of one response
LARGEST = 1e30  #: as of a reward


class NoSample(Exception):
    """What a function returned is no sample."""


def samples_of(returned: Any, vocab_size: int, longest: int) -> list[Made]:
    """The samples in what a function returned; longest: tokens of a response at most.  NoSample says what is wrong."""
    several = list(returned) if isinstance(returned, list | tuple) else [returned]
    if not several:
        raise NoSample("returned an empty list: a response is one sample at least")
    if len(several) > MOST:
        raise NoSample(f"returned {len(several)} samples for one response, {MOST} at most are taken")
    for sample in several:
        if not isinstance(sample, Sample):
            raise NoSample(f"returned a {type(sample).__name__}, not a sample, a list of samples, or None")
    return [_checked(sample, vocab_size, longest) for sample in several]


def _checked(sample: Sample, vocab_size: int, longest: int) -> Made:
    tokens = _column(sample, "tokens", np.int64)
    count = sample.response_length
    if not isinstance(count, int | np.integer) or not 0 < count < len(tokens):
        raise NoSample(f"set response_length to {count!r}, of {len(tokens)} tokens of prompt and response together")
    if count > longest:
        raise NoSample(f"made a response of {count} tokens, --rollout-max-response-len is {longest}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise NoSample(f"set a token outside of the model's vocabulary of {vocab_size}")
    mask, logprobs, versions = (
        _column(sample, name, kind)
        for name, kind in (("loss_mask", np.int64), ("logprobs", np.float64), ("versions", np.int64))
    )
    for name, column in (("loss_mask", mask), ("logprobs", logprobs), ("versions", versions)):
        if len(column) != count:
            raise NoSample(f"set {len(column)} {name} for a response of {count} tokens")
    if ((mask != 0) & (mask != 1)).any():
        raise NoSample("set a loss_mask of something else than 0 and 1")
    if not np.isfinite(logprobs).all():
        raise NoSample("set a log-prob that is not finite")
    if (versions < 0).any() or (versions >= 2**31).any():
        raise NoSample("set a policy version that is none")
    if sample.status not in (PENDING, COMPLETED, TRUNCATED, ABORTED):
        raise NoSample(f"set the status {sample.status!r}: it is completed, truncated or aborted")
    if sample.status == ABORTED:
        raise NoSample("gave the response up (status aborted)")
    status = COMPLETED if sample.status == PENDING else sample.status
    if not isinstance(sample.metadata, dict):
        raise NoSample("set metadata that is no dict")
    whole = replace(
        sample, response_length=int(count), status=status, response=_text(sample.response), rewards=parts_of(sample)
    )
    return made(whole, reward_of(sample))


def _column(sample: Sample, name: str, kind: type) -> np.ndarray:
    try:
        found = np.asarray([] if getattr(sample, name) is None else getattr(sample, name), kind)
    except (TypeError, ValueError, OverflowError):
        found = np.zeros((0, 0))
    if found.ndim != 1:
        raise NoSample(f"set {name} to what is no list of numbers")
    return found


def reward_of(sample: Sample) -> float | None:
    """The reward that a function has set, None for none.  NoSample if it is no number."""
    if sample.reward is None:
        return None
    try:
        value = float(sample.reward)
    except (TypeError, ValueError):
        raise NoSample(f"set the reward to {sample.reward!r}, which is no number") from None
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise NoSample(f"set the reward to {value:g}: it must be finite, and at most {LARGEST:g}")
    return value


def _text(response: Any) -> str:
    return response.encode(errors="replace").decode() if isinstance(response, str) else str(response)


def parts_of(sample: Sample) -> dict[str, float]:
    """The named parts of the reward that a function has set, as far as they are finite.  NoSample if they are no
    numbers."""
    try:
        return {str(name): float(value) for name, value in sample.rewards.items() if math.isfinite(float(value))}
    except (AttributeError, TypeError, ValueError):
        raise NoSample("set rewards to what is no dict of numbers") from None
