"""Samples of the run as slime's, and back.

Invariants: tokens, loss mask and log-probs that a function returns are carried as they are; what it has set besides
slime's fields goes along as far as it is plain data, so that a reward in another process finds it.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np

from hpcrl.config.options import Options
from hpcrl.rollout.slime_names import types
from hpcrl.rollout.slime_names.types import SlimeStatus
from hpcrl.sample import ABORTED, COMPLETED, PENDING, TRUNCATED, Sample

KEPT = "slime_attributes"  #: the key of metadata under which they are
LARGEST = 2**20  #: bytes of them
EACH: ContextVar[int] = ContextVar("each", default=0)  #: responses to a prompt of the evaluation at hand; 0: it is none
_FIELDS = frozenset(each.name for each in fields(types.SlimeSample))
_STATUS = {
    SlimeStatus.PENDING: PENDING,
    SlimeStatus.COMPLETED: COMPLETED,
    SlimeStatus.TRUNCATED: TRUNCATED,
    SlimeStatus.ABORTED: ABORTED,
    SlimeStatus.FAILED: COMPLETED,  # slime grades and trains it
}


class NotSlimes(Exception):
    """What a function returned is no sample of slime's that could be taken."""


def to_slime(
    sample: Sample,
    options: Options,
    prompt: Any = None,
    pending: bool = False,
    graded: bool = True,
    key: str | None = None,
) -> types.SlimeSample:
    """A sample of the run as slime's.

    Args:
        prompt: the text that the model reads, where that is known; else that of the prompt file.
        pending: as before its response is made: slime's functions encode the prompt themselves.
        graded: whether its reward is one.
        key: under which an object has it; None: --reward-key.
    """
    metadata = dict(sample.metadata)
    kept = metadata.pop(KEPT, {})
    made = types.SlimeSample(
        group_index=sample.group,
        index=sample.group * (EACH.get() or options.n_samples_per_prompt) + sample.index,
        rollout_id=None,
        prompt=sample.prompt if prompt is None else prompt,
        label=sample.label,
        metadata=metadata,
        remove_sample=sample.remove_sample,
        session_id=f"{sample.group}-{sample.index}",
    )
    if not pending:
        made.response, made.response_length = sample.response, sample.response_length
        made.have_columns(tokens=sample.tokens, loss_mask=sample.loss_mask, rollout_log_probs=sample.logprobs)
        made.weight_versions = [str(version) for version in dict.fromkeys(sample.versions.tolist())]
        made.status = SlimeStatus(sample.status)
        key = key or options.reward_key
        if graded and sample.reward is not None and not math.isnan(sample.reward):
            made.reward = {**sample.rewards, key: sample.reward} if key else sample.reward
    for name, value in kept.items():
        setattr(made, name, value)
    return made


def from_slime(made: Any, asked: Sample, options: Options, key: str | None = None) -> tuple[Sample, bool]:
    """(the sample that a function returned, whether it has log-probs of its own).

    Args:
        key: of the reward in an object; None: --reward-key.

    Raises:
        NotSlimes: if it is none.
    """
    if not isinstance(made, types.SlimeSample):
        raise NotSlimes(f"returned a {type(made).__name__}, not a sample of slime's, a list of them, or None")
    count = made.response_length
    mask = [1] * count if made.loss_mask is None else made.loss_mask
    given = made.rollout_log_probs is not None and len(made.rollout_log_probs) > 0
    reward, rewards = reward_of(made.reward, key or options.reward_key)
    kept = attributes_of(made)
    sample = Sample(
        group=asked.group,
        index=asked.index,
        tokens=_numbers(made.tokens),
        response_length=count,
        loss_mask=_numbers(mask),
        logprobs=_numbers(made.rollout_log_probs) if given else np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        reward=reward,
        status=status_of(made.status),
        prompt=asked.prompt,
        response=made.response,
        label=asked.label,
        metadata=dict(made.metadata or {}) | ({KEPT: kept} if kept else {}),
        rewards=rewards,
        remove_sample=bool(made.remove_sample),
    )
    return sample, given


def reward_of(reward: Any, key: str | None) -> tuple[Any, dict[str, float]]:
    """(a reward, its parts by name if it is an object).

    Raises:
        NotSlimes: if the object does not have it.
    """
    if not isinstance(reward, dict):
        return reward, {}
    if key not in reward:
        lacks = f"{key!r} is not in it" if key else "give --reward-key"
        raise NotSlimes(f"set the reward to an object with {', '.join(map(str, reward))}: {lacks}")
    return reward[key], {str(name): value for name, value in reward.items() if isinstance(value, int | float)}


def status_of(status: Any) -> str:
    """A status of slime's, or its value.

    Raises:
        NotSlimes: if it is none.
    """
    try:
        return _STATUS[SlimeStatus(status)]
    except ValueError:
        raise NotSlimes(f"set the status {status!r}, which is none of slime's") from None


def attributes_of(made: types.SlimeSample) -> dict[str, Any]:
    """What a function has set on a sample besides slime's fields, as far as it is plain data."""
    found = {}
    for name, value in vars(made).items():
        if name in _FIELDS or name.startswith("_"):
            continue
        try:
            data = msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
            continue
        if len(data) <= LARGEST:
            found[name] = msgspec.msgpack.decode(data)
    return found


def _numbers(values: Any) -> Any:
    """Tensors as arrays; what checks samples refuses what are no numbers."""
    return values.detach().cpu().numpy() if hasattr(values, "detach") else values
