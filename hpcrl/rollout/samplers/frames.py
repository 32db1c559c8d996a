"""What the rollout process and a process that runs a custom function say to each other, in frames (see
`worker_process.py`).

Invariant: plain data alone, decoded into these types; nothing is unpickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hpcrl.rollout.grading.frames import ERROR, TIMEOUT, SentSample
from hpcrl.sample import Sample

__all__ = ["ERROR", "TIMEOUT", "Call", "Cancel", "Done", "Made", "Ready", "Setup", "made"]


class Setup(msgspec.Struct):
    """The first frame, to the process.  options: as JSON."""

    options: bytes


class Ready(msgspec.Struct):
    """The answer to it.  error: what is wrong with the function."""

    error: str = ""
    hint: str = ""
    trace: str = ""


class Call(msgspec.Struct, tag=True):
    """Make a response: its prompt as a sample without one, how it is sampled, and where and by which key to ask for
    it."""

    id: int
    sample: SentSample
    sampling_params: dict[str, Any]
    base_url: str
    api_key: str
    evaluation: bool
    version: int


class Cancel(msgspec.Struct, tag=True):
    """The response is not wanted any more, or took too long."""

    id: int


class Made(msgspec.Struct):
    """A sample that a function returned; the arrays as bytes.  reward: None where it set none."""

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


class Done(msgspec.Struct):
    """What came of a call.

    samples: None where the function returned None: those that it had the endpoint make, of which `reward`, `rewards`
    and `metadata` are;
    failure: "", TIMEOUT or ERROR, with its text.
    """

    id: int
    samples: list[Made] | None = None
    reward: float | None = None
    rewards: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    failure: str = ""
    text: str = ""
    trace: str = ""


_KINDS = {"tokens": np.int32, "loss_mask": np.uint8, "logprobs": np.float32, "versions": np.int32}


def made(sample: Sample, reward: float | None) -> Made:
    """A sample as it is sent."""
    columns = {name: np.asarray(getattr(sample, name), kind).tobytes() for name, kind in _KINDS.items()}
    return Made(
        sample.response_length,
        **columns,
        status=sample.status,
        response=sample.response,
        metadata=sample.metadata,
        reward=reward,
        rewards=sample.rewards,
    )


def arrays(sent: Made) -> dict[str, np.ndarray]:
    """The arrays of what was sent, by name."""
    return {name: np.frombuffer(getattr(sent, name), kind).copy() for name, kind in _KINDS.items()}
