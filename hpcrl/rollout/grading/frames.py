"""What the rollout process and a grading process say to each other: MessagePack, a frame a message (see
`worker_process.py`).

Invariant: plain data alone, decoded into these types; nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hpcrl.sample import Sample

_ARRAYS = {"tokens": np.int32, "loss_mask": np.uint8, "logprobs": np.float32, "versions": np.int32}

TIMEOUT, ERROR = "timeout", "error"  #: how a grading fails


class Setup(msgspec.Struct):
    """The first frame, to the process.  options: as JSON; words: the rewards to load; memory: bytes beyond the
    start."""

    options: bytes
    words: list[str]
    memory: int


class Ready(msgspec.Struct):
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


class Task(msgspec.Struct):
    """Samples to grade (several: a group for one call), by which rewards, within how many seconds."""

    id: int
    words: list[str]
    key: str | None
    seconds: float
    samples: list[SentSample]


class Outcome(msgspec.Struct):
    """What came of one sample.  parts: {reward, or key of its object: value}; failure: "", TIMEOUT or ERROR, with its
    text."""

    values: dict[str, float] = {}
    parts: dict[str, float] = {}
    failure: str = ""
    text: str = ""
    trace: str = ""


class Reply(msgspec.Struct):
    """The outcomes of a task, one a sample."""

    id: int
    outcomes: list[Outcome]


def send_sample(sample: Sample, arrays: bool) -> SentSample:
    """A sample as it is sent, with its token arrays or without."""
    columns = (
        {name: np.asarray(getattr(sample, name), kind).tobytes() for name, kind in _ARRAYS.items()} if arrays else {}
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
    arrays = {name: np.frombuffer(getattr(sent, name), kind).copy() for name, kind in _ARRAYS.items()}
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
