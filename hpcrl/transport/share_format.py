"""Samples as columns, and a share of a batch as bytes: one msgspec header and the columns as they lie in memory.

    frame 0   header: rollout id, policy version, the names and shapes of the arrays, the micro-batches
    frame 1   table: a row for each sample of the whole rollout, so that every rank can compare a sample with all others
    frame 2   own: which rows of the table are this share's samples, in its order
    frame 3-  the columns of `sample.COLUMNS` that this run has, in that order, little-endian

Encryption costs more than all else together, so two columns go in fewer bytes: the versions of the tokens as runs (a
sample has one version, or a few, but thousands of tokens), the loss mask as bits.

Invariants: nothing is pickled and no Python object exists per token; table, tokens and logprobs of a decoded share are
views on the frames.  Both sides prove who they are first (`auth.py`), and samples are checked where they are made
(`Sample.check`), so `decode` takes what `encode` has written as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from hpcrl.errors import DataError, HpcrlError
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import COLUMNS, OPTIONAL, REQUIRED, STATUSES

#: one row a sample; what the trainer needs to know of it besides the token columns
ROW = np.dtype(
    [
        ("group_index", "<i8"),
        ("response_index", "<i4"),
        ("length", "<i4"),  # prompt + response
        ("response_length", "<i4"),
        ("trained", "<i8"),  # trained tokens (mask sum) of the response that it is of, all its samples together
        ("status", "<i4"),  # position in STATUSES; PENDING: it is filling, or was not graded, and counts nowhere
        ("reward", "<f8"),
        ("baseline", "<f8"),  # NaN: none
    ]
)


@dataclass
class SampleBatch:
    """Samples as columns.

    Attributes:
        rows: ROW [n].
        tokens: int32 [sum of length].
        loss_mask: uint8 [sum of response_length], in row order.
        rollout_log_probs: float32 of the same length.
        versions: int32 of the same length.
        extra: columns of OPTIONAL, by name.
    """

    rows: np.ndarray
    tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_log_probs: np.ndarray
    versions: np.ndarray
    extra: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def from_samples(cls, samples: list[Sample]) -> SampleBatch:
        """Columns of `samples`, in their order.

        Raises:
            DataError: if some have an optional column and others have not.
        """
        rows = [
            (
                s.group_index,
                s.response_index,
                len(s.array("tokens")),
                s.response_length,
                int(np.count_nonzero(s.array("loss_mask"))),
                STATUSES.index(s.status),
                s.score,
                s.baseline,
            )
            for s in samples
        ]
        columns = {name: _join([s.array(name) for s in samples], kind.dtype) for name, kind in REQUIRED.items()}
        extra = {name: _join([s.array(name) for s in samples], OPTIONAL[name].dtype) for name in _optional(samples)}
        return cls(whole_responses(np.array(rows, ROW)), **columns, extra=extra)

    def columns(self) -> dict[str, np.ndarray]:
        """The columns that it has, by name, in the order of COLUMNS."""
        return {name: getattr(self, name) for name in REQUIRED} | self.extra

    @property
    def token_offsets(self) -> np.ndarray:
        """int64 [n + 1]: where each sample's tokens begin and end."""
        return _offsets(self.rows["length"])

    @property
    def response_offsets(self) -> np.ndarray:
        """int64 [n + 1]: where each sample's response columns begin and end."""
        return _offsets(self.rows["response_length"])

    def select(self, indices: list[int] | np.ndarray) -> SampleBatch:
        """The samples at `indices`, in that order, as a new batch."""
        at = {name: _offsets(self.rows[name]) for name in ("length", "response_length")}

        def cut(name: str, column: np.ndarray) -> np.ndarray:
            bounds = at[COLUMNS[name].counted_by]
            return _join([column[bounds[i] : bounds[i + 1]] for i in indices] or [column[:0]], COLUMNS[name].dtype)

        columns = {name: cut(name, getattr(self, name)) for name in REQUIRED}
        extra = {name: cut(name, column) for name, column in self.extra.items()}
        return SampleBatch(self.rows[np.asarray(indices, dtype=np.int64)], **columns, extra=extra)

    def offsets_of(self, name: str) -> np.ndarray:
        """int64 [n + 1]: where each sample's part of a column begins and ends."""
        return _offsets(self.rows[COLUMNS[name].counted_by])


def responses_of(rows: np.ndarray) -> np.ndarray:
    """int64 [n], numbered from 0: which response each row is of.  The samples of one response are together."""
    keys = rows[["group_index", "response_index"]]
    return np.cumsum(np.concatenate([[False], keys[1:] != keys[:-1]])[: len(rows)], dtype=np.int64)


def whole_responses(rows: np.ndarray) -> np.ndarray:
    """Rows whose `trained` are of single samples, with those of whole responses."""
    numbers = responses_of(rows)
    rows["trained"] = np.bincount(numbers, rows["trained"])[numbers] if len(rows) else 0
    return rows


def _optional(samples: list[Sample]) -> list[str]:
    """Names of the optional columns that all samples have, in the order of OPTIONAL."""
    found = [name for name in OPTIONAL if samples and samples[0].has(name)]
    for sample in samples:
        if other := [name for name in OPTIONAL if sample.has(name) != (name in found)]:
            raise DataError(
                f"some samples of a batch have {other[0]}, sample {sample.response_index} of group "
                f"{sample.group_index} differs"
            )
    return found


def _join(parts: list[np.ndarray], kind: np.typing.DTypeLike) -> np.ndarray:
    return np.concatenate([np.asarray(p, kind) for p in parts]) if parts else np.zeros(0, kind)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


#: bytes, bytearray, memoryview, zmq.Frame: anything with the buffer protocol
Buffer = Any
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
#: so many tokens in a row, of one policy version
RUN = np.dtype([("version", "<i8"), ("length", "<i8")])
#: what lies in the frames after the first, in order -> dtype on the wire; loss_mask: 8 tokens an element, the first in
#: the highest bit
WIRE = {"table": ROW, "own": np.dtype("<i4")} | {name: kind.dtype for name, kind in COLUMNS.items()}
WIRE |= {"loss_mask": np.dtype("u1"), "versions": RUN}
MOST_FRAMES = 1 + len(WIRE)


class WireError(HpcrlError):
    """What came over the wire, or was to go over it, is not a message of the queue."""


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


class ShareHeader(msgspec.Struct, frozen=True):
    """Frame 0.

    Attributes:
        shapes: of the arrays in the other frames, by name.
    """

    rollout_id: int
    version: int
    shapes: dict[str, tuple[int, ...]]
    micro_batches: list[list[list[int]]]
    step_samples: list[int]
    step_tokens: list[int]
    metrics: dict[str, float]


_unpack_header = msgspec.msgpack.Decoder(ShareHeader).decode


def encode(share: Share) -> list[Buffer]:
    """`share` as frames: the header and one view on each column; no array is copied that is contiguous already.

    The columns must not change until the frames are sent.
    """
    batch = share.batch
    rows = sorted(row for step in share.micro_batches for micro_batch in step for row in micro_batch)
    assert rows == list(range(len(batch))), f"the micro-batches do not hold each of {len(batch)} rows once"
    arrays = {"table": share.table, "own": share.own} | batch.columns()
    arrays |= {"loss_mask": np.packbits(batch.loss_mask), "versions": _runs(batch.versions)}
    arrays = {name: np.ascontiguousarray(array, WIRE[name]) for name, array in arrays.items()}
    header = ShareHeader(
        share.rollout_id,
        share.version,
        {name: array.shape for name, array in arrays.items()},
        share.micro_batches,
        share.step_samples,
        share.step_tokens,
        share.metrics,
    )
    frames = [memoryview(array.reshape(-1).view(np.uint8)) for array in arrays.values()]
    return [msgspec.msgpack.encode(header), *frames]


def decode(frames: Sequence[Buffer]) -> Share:
    """The share in `frames`, which its large arrays are views on."""
    header = _unpack_header(frames[0])
    found = {}
    for (name, shape), frame in zip(header.shapes.items(), frames[1:], strict=True):
        array = np.frombuffer(frame, WIRE[name]).reshape(shape)
        found[name] = array if array.flags.aligned else array.copy()
    runs, table, own = found["versions"], found.pop("table"), found.pop("own")
    found["loss_mask"] = np.unpackbits(found["loss_mask"], count=len(found["rollout_log_probs"]))
    found["versions"] = np.repeat(runs["version"].astype(np.int32), runs["length"])
    batch = SampleBatch(table[own], **{name: found.pop(name) for name in REQUIRED}, extra=found)
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


def _runs(versions: np.ndarray) -> np.ndarray:
    """int32 [tokens] as RUN [runs]."""
    one = len(versions) and versions.min() == versions.max()  # as of most shares
    ends = np.zeros(0, np.int64) if one else np.flatnonzero(versions[1:] != versions[:-1]) + 1
    bounds = np.concatenate([[0], ends, [len(versions)]]) if len(versions) else np.zeros(1, np.int64)
    runs = np.zeros(len(bounds) - 1, RUN)
    runs["version"], runs["length"] = versions[bounds[:-1]], np.diff(bounds)
    return runs
