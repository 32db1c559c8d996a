"""What the rollout process and its worker processes say to each other: MessagePack, a frame a message
(`worker_pool.py`).

The first half is the grading processes', the second that of the processes that run a custom generate function.

Invariant: plain data alone, decoded into these types; nothing is unpickled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from hpcrl.sample import PackedSample, Sample, pack

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


class GradingTask(msgspec.Struct):
    """Samples to grade (several: a group for one call), by which rewards, within how many seconds."""

    id: int
    words: list[str]
    key: str | None
    seconds: float
    samples: list[PackedSample]


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


def send_sample(sample: Sample, columns: bool) -> PackedSample:
    """A sample as it is sent, with its columns or without."""
    return pack(replace(sample, response=_clean(sample.response), label=_clean(sample.label)), columns)


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
    sample: PackedSample
    sampling_params: dict[str, Any]
    base_url: str
    api_key: str
    evaluation: bool
    version: int


class CancelCall(msgspec.Struct, tag=True):
    """The response is not wanted any more, or took too long."""

    id: int


class CustomResult(msgspec.Struct):
    """What came of a call.

    samples: those that the function returned, with reward NaN where it set none; None where it returned None: those
    that it had the endpoint make, of which `reward`, `rewards` and `metadata` are;
    failure: "", TIMEOUT or ERROR, with its text.
    """

    id: int
    samples: list[PackedSample] | None = None
    reward: float | None = None
    rewards: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    failure: str = ""
    text: str = ""
    trace: str = ""
