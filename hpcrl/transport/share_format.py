"""A share of a batch as bytes: one msgspec header and the columns as they lie in memory.

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

from hpcrl.errors import HpcrlError
from hpcrl.transport.sample_batch import ROW, SampleBatch
from hpcrl.utils.sample_parts import COLUMNS, REQUIRED

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
    """What came over the wire, or was to go over it, is none of the queue's messages."""


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
