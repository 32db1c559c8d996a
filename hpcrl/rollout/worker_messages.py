"""What the rollout process and its worker processes say to each other: MessagePack, a frame a message
(`worker_pool.py`).

The first half is the grading processes', the second that of the processes that run a custom generate function.

Invariant: plain data alone, decoded into these types; nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hpcrl.sample import REQUIRED, Sample

TIMEOUT, ERROR = "timeout", "error"  #: how a grading fails


class GradingSetup(msgspec.Struct):
    """The first frame, to the process.  options: as JSON; words: the rewards to load; memory: bytes beyond the
    start."""

    options: bytes
    words: list[str]
    memory: int


class RewardsLoaded(msgspec.Struct):
    """The answer to it.  error: what is wrong with a reward; waits: the rewards that are async."""

    waits: list[str] = []
    error: str = ""
    hint: str = ""
    trace: str = ""


class SentSample(msgspec.Struct):
    """A Sample; the arrays as bytes, empty where no reward looks at them."""

    group: int
    index: int
    response_length: int
    status: str
    prompt: Any
    response: str
    label: Any
    metadata: dict[str, Any]
    tokens: bytes = b""
    loss_mask: bytes = b""
    logprobs: bytes = b""
    versions: bytes = b""


class GradingTask(msgspec.Struct):
    """Samples to grade (several: a group for one call), by which rewards, within how many seconds."""

    id: int
    words: list[str]
    key: str | None
    seconds: float
    samples: list[SentSample]


class GradingOutcome(msgspec.Struct):
    """What came of one sample.  parts: {reward, or key of its object: value}; failure: "", TIMEOUT or ERROR, with its
    text."""

    values: dict[str, float] = {}
    parts: dict[str, float] = {}
    failure: str = ""
    text: str = ""
    trace: str = ""


class GradingReply(msgspec.Struct):
    """The outcomes of a task, one a sample."""

    id: int
    outcomes: list[GradingOutcome]


def send_sample(sample: Sample, arrays: bool) -> SentSample:
    """A sample as it is sent, with its token arrays or without."""
    columns = (
        {name: np.asarray(getattr(sample, name), kind).tobytes() for name, kind in REQUIRED.items()} if arrays else {}
    )
    return SentSample(
        sample.group,
        sample.index,
        sample.response_length,
        sample.status,
        sample.prompt,
        _clean(sample.response),
        _clean(sample.label),
        sample.metadata,
        **columns,
    )


def receive_sample(sent: SentSample) -> Sample:
    arrays = {name: np.frombuffer(getattr(sent, name), kind).copy() for name, kind in REQUIRED.items()}
    return Sample(
        group=sent.group,
        index=sent.index,
        response_length=sent.response_length,
        status=sent.status,
        prompt=sent.prompt,
        response=sent.response,
        label=sent.label,
        metadata=sent.metadata,
        **arrays,
    )


def _clean(text: Any) -> Any:
    """A text without half characters, which no UTF-8 has."""
    if not isinstance(text, str) or text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


# ---- custom functions


class SamplerSetup(msgspec.Struct):
    """The first frame, to the process.  options: as JSON."""

    options: bytes


class FunctionLoaded(msgspec.Struct):
    """The answer to it.  error: what is wrong with the function."""

    error: str = ""
    hint: str = ""
    trace: str = ""


class CustomCall(msgspec.Struct, tag=True):
    """Make a response: its prompt as a sample without one, how it is sampled, and where and by which key to ask for
    it."""

    id: int
    sample: SentSample
    sampling_params: dict[str, Any]
    base_url: str
    api_key: str
    evaluation: bool
    version: int


class CancelCall(msgspec.Struct, tag=True):
    """The response is not wanted any more, or took too long."""

    id: int


class ReturnedSample(msgspec.Struct):
    """A sample that a function returned; the columns as bytes.  reward: None where it set none."""

    response_length: int
    tokens: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: bytes
    status: str
    response: str
    metadata: dict[str, Any]
    reward: float | None = None
    rewards: dict[str, float] = {}


class CustomResult(msgspec.Struct):
    """What came of a call.

    samples: None where the function returned None: those that it had the endpoint make, of which `reward`, `rewards`
    and `metadata` are;
    failure: "", TIMEOUT or ERROR, with its text.
    """

    id: int
    samples: list[ReturnedSample] | None = None
    reward: float | None = None
    rewards: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    failure: str = ""
    text: str = ""
    trace: str = ""


def send_returned(sample: Sample, reward: float | None) -> ReturnedSample:
    """A sample as it is sent."""
    columns = {name: np.asarray(getattr(sample, name), kind).tobytes() for name, kind in REQUIRED.items()}
    return ReturnedSample(
        sample.response_length,
        **columns,
        status=sample.status,
        response=sample.response,
        metadata=sample.metadata,
        reward=reward,
        rewards=sample.rewards,
    )


def columns_of(sent: ReturnedSample) -> dict[str, np.ndarray]:
    """The columns of what was sent, by name."""
    return {name: np.frombuffer(getattr(sent, name), kind).copy() for name, kind in REQUIRED.items()}
