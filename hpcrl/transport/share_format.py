"""A share of a batch as bytes: one msgspec header and the columns as they lie in memory.

    frame 0   header: wire format, rollout id, policy version, the columns' names, dtypes and sizes, the micro-batches
    frame 1   table: a row for each sample of the whole rollout, so that every rank can compare a sample with all others
    frame 2   own: which rows of the table are this share's samples, in its order
    frame 3-  the columns of `sample.COLUMNS` that this run has, in that order, little-endian

Encryption costs more than all else together, so two columns go in fewer bytes: the versions of the tokens as runs (a
sample has one version, or a few, but thousands of tokens), the loss mask as bits.

Invariants: nothing is pickled and no Python object exists per token; whatever the bytes are, `decode` returns a share
whose parts fit each other, or raises WireError and nothing else; table, tokens and logprobs of a decoded share are
views on the frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from hpcrl.errors import HpcrlError
from hpcrl.transport.sample_batch import ROW, SampleBatch
from hpcrl.utils.sample_parts import COLUMNS, OPTIONAL, REQUIRED, STATUSES

#: bytes, bytearray, memoryview, zmq.Frame: anything with the buffer protocol
Buffer = Any
#: number of the wire format; both sides must speak the same
FORMAT = 4
#: so many tokens in a row, of one policy version
RUN = np.dtype([("version", "<i8"), ("length", "<i8")])
_OF_TABLE = "row {} of the table: "
_WRONG = "is not between 0 and length"
_WHAT_DECODING_RAISES = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, BufferError)


class _Shorter(NamedTuple):
    """A column that goes in fewer bytes.

    Attributes:
        to_wire: its elements of type `dtype`.
        from_wire: those, and how many tokens -> the column.
    """

    dtype: np.dtype
    to_wire: Callable[[np.ndarray], np.ndarray]
    from_wire: Callable[[np.ndarray, int], np.ndarray]


Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Row = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class WireError(HpcrlError):
    """What came over the wire, or was to go over it, is not what the wire format allows."""


@dataclass
class Share:
    """What one data-parallel rank gets of a batch.

    Attributes:
        batch: the rank's samples; micro_batches[optimizer step][micro-batch]: rows of `batch`, each row in exactly one.
        step_samples: samples of each optimizer step over all ranks.
        step_tokens: sum of the loss mask of each step over all ranks.
        version: the policy version that the batch is meant for.
        metrics: numbers about the rollout, to be logged.
        table: ROW [n], every sample of the rollout, on all ranks, by group and index.
        own: int32 [samples of the batch], where in it the batch's rows are; without them the batch is the whole
            rollout.
        frames: the bytes that it was decoded from, for handing them on as they are; none where the share was made.
    """

    rollout_id: int
    version: int
    batch: SampleBatch
    micro_batches: list[list[list[int]]]
    step_samples: list[int]
    step_tokens: list[int]
    metrics: dict[str, float] = field(default_factory=dict)
    table: np.ndarray = None  # type: ignore[assignment]
    own: np.ndarray = None  # type: ignore[assignment]
    frames: Sequence[Buffer] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.table is None:
            self.table, self.own = self.batch.rows, np.arange(len(self.batch), dtype=np.int32)


class Column(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One raw buffer: its name, numpy dtype, number of elements, and shape of each."""

    name: str
    dtype: str
    size: Count
    shape: tuple[Count, ...] = ()


class ShareHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Frame 0."""

    format: int
    rollout_id: Count
    version: Count
    columns: list[Column]
    micro_batches: list[list[list[Row]]]
    step_samples: list[Count]
    step_tokens: list[Count]
    metrics: dict[str, float]


class _Format(msgspec.Struct, frozen=True):
    """The one field of a header that every version of the format has."""

    format: int


_pack = msgspec.msgpack.Encoder().encode
_unpack_format = msgspec.msgpack.Decoder(_Format).decode
_unpack_header = msgspec.msgpack.Decoder(ShareHeader).decode


# ---- to bytes


def encode(share: Share) -> list[Buffer]:
    """`share` as frames: the header and one view on each column; no array is copied that is contiguous already.

    The columns must not change until the frames are sent.

    Raises:
        WireError: if the parts of the share do not fit each other.
    """
    try:
        batch = share.batch
        _check_lengths(batch)
        columns = {name: np.ascontiguousarray(column, COLUMNS[name].dtype) for name, column in batch.columns().items()}
        required = {name: columns.pop(name) for name in REQUIRED}
        extra = {name: columns[name] for name in OPTIONAL if name in columns}
        table, own = np.ascontiguousarray(share.table, WIRE["table"]), np.ascontiguousarray(share.own, WIRE["own"])
        sent = {"table": table, "own": own}
        sent |= {name: SHORTER[name].to_wire(array) if name in SHORTER else array for name, array in required.items()}
        sent |= extra
        header = ShareHeader(
            FORMAT,
            share.rollout_id,
            share.version,
            [Column(name, str(WIRE[name]), len(array), array.shape[1:]) for name, array in sent.items()],
            share.micro_batches,
            share.step_samples,
            share.step_tokens,
            share.metrics,
        )
        rows = np.ascontiguousarray(batch.rows, ROW)
        _check(header, SampleBatch(rows, **required, extra=extra), table, own)
        return [_pack(header), *(memoryview(array.reshape(-1).view(np.uint8)) for array in sent.values())]
    except _WHAT_DECODING_RAISES as error:
        raise WireError(f"the share of rollout {share.rollout_id} cannot be sent: {error}") from error
    except WireError as error:
        raise WireError(f"the share of rollout {share.rollout_id} cannot be sent: {error.what}") from error


# ---- from bytes


def decode(frames: Sequence[Buffer]) -> Share:
    """The share in `frames`, which its large arrays are views on.

    Raises:
        WireError: if it is not whole and consistent.
    """
    if not LEAST_FRAMES <= len(frames) <= MOST_FRAMES:
        raise WireError(f"a share has {LEAST_FRAMES} to {MOST_FRAMES} frames, this one has {len(frames)}")
    header = _header(frames[0])
    if len(header.columns) != len(frames) - 1:
        raise WireError(f"a share declares {len(header.columns)} columns and has {len(frames) - 1}")
    names = _names(header.columns)
    found = {name: _column(name, *part) for name, *part in zip(names, header.columns, frames[1:], strict=True)}
    table, own = found.pop("table"), found.pop("own")
    _check_own(table, own)  # before it says where to look
    tokens = len(found["rollout_log_probs"])
    found |= {name: kind.from_wire(found[name], tokens) for name, kind in SHORTER.items()}
    batch = SampleBatch(table[own], **{name: found.pop(name) for name in REQUIRED}, extra=found)
    _check(header, batch, table, own)
    return Share(
        header.rollout_id,
        header.version,
        batch,
        header.micro_batches,
        header.step_samples,
        header.step_tokens,
        header.metrics,
        table,
        own,
        frames,
    )


def _header(frame: Buffer) -> ShareHeader:
    try:
        found = _unpack_format(frame).format
        if found != FORMAT:
            raise WireError(
                f"the share has wire format {found}, this side speaks {FORMAT}",
                "use one version of hpcrl on all hosts",
            )
        return _unpack_header(frame)
    except _WHAT_DECODING_RAISES as error:
        raise WireError(f"the header of a share is malformed: {error}") from error


def _names(columns: Sequence[Column]) -> list[str]:
    """The columns: those of every share, then those that it says it has, in order."""
    said = [column.name for column in columns[len(USUAL) :]]
    known = [name for name in OPTIONAL if name in said]
    if said != known:
        raise WireError(
            f"a share has the columns {', '.join(map(repr, said))} in addition to the usual, {', '.join(OPTIONAL)} may "
            "be"
        )
    return [*USUAL, *known]


def _column(name: str, column: Column, frame: Buffer) -> np.ndarray:
    dtype, dims = WIRE[name], COLUMNS[name].dims if name in COLUMNS else 0
    if (column.name, column.dtype, len(column.shape)) != (name, str(dtype), dims):
        what = f"found {column.name!r} of type {column.dtype!r} and {len(column.shape)}"
        raise WireError(f"column {name} of type {dtype} and {dims} dimensions an element expected, {what}")
    found = memoryview(frame).nbytes
    declared = column.size * math.prod(column.shape) * dtype.itemsize
    if found != declared:
        raise WireError(f"column {name}: {column.size} elements declared ({declared} bytes), {found} bytes found")
    array = np.frombuffer(frame, dtype).reshape(column.size, *column.shape)
    return array if array.flags.aligned else array.copy()


# ---- columns in fewer bytes


def _unpack_mask(bits: np.ndarray, tokens: int) -> np.ndarray:
    """uint8 [tokens] of 0 and 1.

    Raises:
        WireError: unless there are just so many bits, filled up to a byte.
    """
    if len(bits) != -(-tokens // 8):
        raise WireError(f"loss_mask: {len(bits)} bytes do not hold one bit for each of {tokens} tokens")
    return np.unpackbits(bits, count=tokens)


def _runs(versions: np.ndarray) -> np.ndarray:
    """int32 [tokens] as RUN [runs]."""
    one = len(versions) and versions.min() == versions.max()  # as of most shares
    ends = np.zeros(0, np.int64) if one else np.flatnonzero(versions[1:] != versions[:-1]) + 1
    bounds = np.concatenate([[0], ends, [len(versions)]]) if len(versions) else np.zeros(1, np.int64)
    runs = np.zeros(len(bounds) - 1, RUN)
    runs["version"], runs["length"] = versions[bounds[:-1]], np.diff(bounds)
    return runs


def _spread(runs: np.ndarray, tokens: int) -> np.ndarray:
    """RUN [runs] as int32 [tokens].

    Raises:
        WireError: unless the runs hold exactly so many tokens.
    """
    lengths, versions = runs["length"], runs["version"]
    _refuse((lengths < 1) | (lengths > tokens), "versions: the length of run {} does not fit")
    _refuse(versions != versions.astype(np.int32), "versions: that of run {} is not a 32-bit number")
    if (
        len(runs) > tokens or int(lengths.sum()) != tokens
    ):  # no overflow: the sum is at most the square of a column's length
        raise WireError(f"the columns hold {tokens} elements, the runs of versions {len(runs)} runs of other lengths")
    return np.repeat(versions.astype(np.int32), lengths)


#: loss_mask: 8 tokens an element, the first in the highest bit
SHORTER = {
    "loss_mask": _Shorter(np.dtype("u1"), np.packbits, _unpack_mask),
    "versions": _Shorter(RUN, _runs, _spread),
}
_PLACES = {"table": ROW, "own": np.dtype("<i4")}  # which samples they are
#: what lies in the frames after the first, in order -> dtype on the wire
WIRE = _PLACES | {name: SHORTER[name].dtype if name in SHORTER else kind.dtype for name, kind in COLUMNS.items()}
USUAL = (*_PLACES, *REQUIRED)  #: what every share has
LEAST_FRAMES, MOST_FRAMES = 1 + len(USUAL), 1 + len(WIRE)


# ---- what must hold of every share


def _check(header: ShareHeader, batch: SampleBatch, table: np.ndarray, own: np.ndarray) -> None:
    """Raise WireError unless table, rows, columns, micro-batches and numbers fit each other."""
    _check_own(table, own)
    if batch.rows.tobytes() != table[own].tobytes():
        raise WireError("the rows of the batch are not those of the table")
    _check_table(table)
    _check_lengths(batch)
    _check_values(batch)
    _check_micro_batches(header, len(batch), len(table))
    for name, value in header.metrics.items():
        if not math.isfinite(value):
            raise WireError(f"metric {name!r} is {value}")


def _check_own(table: np.ndarray, own: np.ndarray) -> None:
    _refuse((own < 0) | (own >= len(table)), "sample {} is not a row of the table")
    if len(np.unique(own)) < len(own):
        raise WireError("a row of the table is in the share twice")


def _check_table(table: np.ndarray) -> None:
    _refuse(
        (table["response_length"] < 0) | (table["response_length"] > table["length"]),
        f"{_OF_TABLE}response_length {_WRONG}",
    )
    _refuse((table["status"] < 0) | (table["status"] >= len(STATUSES)), _OF_TABLE + "unknown status code")
    _refuse(~np.isfinite(table["reward"]), _OF_TABLE + "reward is not finite")
    _refuse(np.isinf(table["baseline"]), _OF_TABLE + "baseline is not finite")


def _check_lengths(batch: SampleBatch) -> None:
    length, response = (batch.rows[name].astype(np.int64) for name in ("length", "response_length"))
    _refuse((response < 0) | (response > length), f"row {{}}: response_length {_WRONG}")
    declared_of = {"length": int(length.sum()), "response_length": int(response.sum())}
    for name, column in batch.columns().items():
        declared = declared_of[COLUMNS[name].counted_by]
        dims = COLUMNS[name].dims
        if (len(column), column.ndim) != (declared, 1 + dims):
            raise WireError(
                f"the rows hold {declared} elements of {name} with {dims} dimensions, the column {column.shape}"
            )


def _check_values(batch: SampleBatch) -> None:
    if len(batch.tokens) and int(batch.tokens.min()) < 0:
        _refuse(batch.tokens < 0, "token {}: negative id")
    if len(batch.loss_mask):
        if int(batch.loss_mask.max()) > 1:
            _refuse(batch.loss_mask > 1, "loss_mask {}: neither 0 nor 1")
        # a NaN is both the least and the greatest element, so two passes without a temporary array find it
        if not (math.isfinite(batch.rollout_log_probs.min()) and math.isfinite(batch.rollout_log_probs.max())):
            _refuse(~np.isfinite(batch.rollout_log_probs), "logprob {}: not finite")
    for name, column in batch.extra.items():
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            _refuse(~np.isfinite(column.reshape(len(column), -1)).all(1), name + " {}: not finite")


def _check_micro_batches(header: ShareHeader, count: int, samples: int) -> None:
    steps = header.micro_batches
    for name, entries in (("step_samples", header.step_samples), ("step_tokens", header.step_tokens)):
        if len(entries) != len(steps):
            raise WireError(f"{len(steps)} optimizer steps, but {name} has {len(entries)} entries")
    if not all(step and all(step) for step in steps):
        raise WireError("an optimizer step has no micro-batch, or a micro-batch no rows")
    if sorted(row for step in steps for micro_batch in step for row in micro_batch) != list(range(count)):
        raise WireError(f"the micro-batches do not hold each of the {count} rows exactly once")
    for number, (step, found) in enumerate(zip(steps, header.step_samples, strict=True)):
        own = sum(map(len, step))
        if own > found:
            raise WireError(f"optimizer step {number} has {found} samples over all ranks, but {own} on this one")
    if sum(header.step_samples) != samples:
        raise WireError(f"the optimizer steps have {sum(header.step_samples)} samples, the table {samples}")


def _refuse(bad: np.ndarray, message: str) -> None:
    """WireError naming the first element where `bad` holds."""
    if bad.any():
        raise WireError(message.format(int(bad.argmax())))
