"""What the rollout process and its worker processes say to each other: MessagePack, a frame a message;
and a sample as bytes, there and in files.

Invariant: plain data alone, decoded into these types; nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import math
import struct
from typing import Any

import msgspec
import numpy as np

from hpcrl.sample import FIELDS, Sample
from hpcrl.sandbox.accounts import news
from hpcrl.sandbox.box_line import SandboxLost
from hpcrl.utils.sample_parts import COLUMNS

_FIELDS = [*FIELDS.items(), ("attributes", dict[str, Any])]
_PackedFields: Any = msgspec.defstruct("_PackedFields", _FIELDS, module=__name__)


class PackedSample(msgspec.Struct):
    """A sample as msgspec writes it.

    Attributes:
        columns: bytes of those that it has, or none of them.
        shapes: of an entry, of those where it has further dimensions.
    """

    fields: _PackedFields
    columns: dict[str, bytes]
    shapes: dict[str, list[int]]


def pack(sample: Sample, columns: bool = True) -> PackedSample:
    """A sample as it is written.

    Args:
        columns: whether those are too that have an entry for each token.
    """
    found, shapes = {}, {}
    for name, kind in COLUMNS.items() if columns else ():
        if sample.has(name):
            column = np.ascontiguousarray(sample.array(name), kind.dtype)
            found[name] = column.tobytes()
            if kind.dims:
                shapes[name] = list(column.shape[1:])
    if isinstance(vars(sample).get("_reward"), dict):
        sample.fold_reward()
    known = vars(sample) | {"reward": vars(sample).get("_reward"), "attributes": sample.attributes()}
    return PackedSample(_PackedFields(*(known[name] for name, _ in _FIELDS)), found, shapes)


def unpack(packed: PackedSample) -> Sample:
    """The sample again; its columns are not set where `pack` was asked for none.

    Raises:
        ValueError, KeyError, TypeError: if it is invalid.
    """
    columns = {name: np.frombuffer(data, COLUMNS[name].dtype).copy() for name, data in packed.columns.items()}
    for name, shape in packed.shapes.items():
        columns[name] = columns[name].reshape(-1, *shape)
    fields = msgspec.structs.asdict(packed.fields)
    attributes = fields.pop("attributes")
    sample = Sample(**fields, **columns)
    for name, value in attributes.items():
        setattr(sample, name, value)
    return sample


TIMEOUT, ERROR = "timeout", "error"  #: how a grading or a call fails
LOST = "lost"  #: how one fails whose sandbox was lost, which says nothing of it: it is done again
MOST = 256  #: samples of one response
_LENGTH = struct.Struct("<Q")


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the socket: MessagePack with its length before it."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader) -> bytes:
    """The body of the next frame.  asyncio.IncompleteReadError at the end."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


class GradingSetup(msgspec.Struct, tag=True):
    """The first frame, to a process that grades.

    Attributes:
        options: as JSON.
        words: the rewards to load.
        memory: bytes that it may take beyond those at its start.
    """

    options: bytes
    words: list[str]
    memory: int


class SamplerSetup(msgspec.Struct, tag=True):
    """The first frame, to a process that runs a custom generate function.

    Attributes:
        options: as JSON.
    """

    options: bytes


class WorkerLoaded(msgspec.Struct):
    """The answer to it.

    Attributes:
        error: what is wrong with the user's code.
        waits: the rewards that are async.
    """

    waits: list[str] = []
    error: str = ""
    hint: str = ""
    trace: str = ""


class CancelRequest(msgspec.Struct, tag=True):
    """Its result is no longer needed, or it took too long."""

    id: int


class Cancelled(msgspec.Struct, tag=True):
    """The reply to a request that has ended because it was cancelled."""

    id: int


class SandboxReport(msgspec.Struct, tag=True):
    """What has changed of the sandboxes of the process; it comes before a reply, and between replies.

    Attributes:
        states, more: as `hpcrl.sandbox.accounts.SandboxNews`.
    """

    states: dict[str, int]
    more: dict[str, float]


def report_frame() -> bytes:
    """The report of this process as a frame, b"" where nothing has changed."""
    found = news()
    return b"" if found is None else frame(SandboxReport(found.states, found.more))


# ---- gradings


class GradingTask(msgspec.Struct, tag=True):
    """Samples to grade (several: a group for one call), and by which rewards."""

    id: int
    words: list[str]
    key: str | None
    samples: list[PackedSample]


class GradingOutcome(msgspec.Struct):
    """What came of one sample.

    Attributes:
        parts: {reward, or key of its object: value}.
        failure: "", TIMEOUT, ERROR or LOST, with its text.
        mistake: whether the user's function is wrong.
    """

    values: dict[str, float] = {}
    parts: dict[str, float] = {}
    failure: str = ""
    text: str = ""
    trace: str = ""
    mistake: bool = False


class GradingReply(msgspec.Struct, tag=True):
    """The outcomes of a task, one a sample."""

    id: int
    outcomes: list[GradingOutcome]


def failure_of(error: BaseException) -> str:
    """LOST for an error that comes of a lost sandbox, whatever was made of it since; ERROR for another."""
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, SandboxLost):
            return LOST
        if isinstance(found, BaseExceptionGroup) and LOST in map(failure_of, found.exceptions):
            return LOST
        found = found.__cause__ or found.__context__
    return ERROR


def send_sample(sample: Sample, columns: bool) -> PackedSample:
    """A sample as it is sent, with its columns or without: what a worker is shown, which is nothing of its grading, and
    no column of OPTIONAL, which may be larger than all others together."""
    shown = sample.replace(
        response=_clean(sample.response),
        label=_clean(sample.label),
        reward=None,
        baseline=math.nan,
        rewards={},
        grading="",
        grading_error="",
        teacher_log_probs=None,
        rollout_routed_experts=None,
        teacher_error="",
        remove_sample=False,
        transcript={},
    )
    return pack(shown, columns)


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


class CustomResult(msgspec.Struct, tag=True):
    """What came of a call.

    Attributes:
        samples: those that the function returned; None where it returned None: those that it had the endpoint make.
        given: the sample that it was given, as it has left it, if it returned None: of its reward and metadata.
        transcript: what the call did in sandboxes, as `samplers.transcript.commands_of`.
        failure, mistake: as in `GradingOutcome`.
    """

    id: int
    samples: list[PackedSample] | None = None
    given: PackedSample | None = None
    failure: str = ""
    text: str = ""
    trace: str = ""
    mistake: bool = False
    transcript: dict[str, Any] = {}
