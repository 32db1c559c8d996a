"""Groups as bytes: msgpack with declared types, the columns of a sample as they lie in memory.

Invariants: what is read is what was written, bit for bit; reading runs nothing that the bytes say; what is damaged, or
of another prompt, is an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from hpcrl.errors import HpcrlError
from hpcrl.rollout.ledger.held import Held
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.sample import REQUIRED, Sample


class _Column(msgspec.Struct):
    """A column of `Sample.extra`."""

    dtype: str
    shape: list[int]
    data: bytes


class PackedSample(msgspec.Struct):
    """A sample; columns: bytes of REQUIRED; fields: what else it holds, by name."""

    group: int
    index: int
    response_length: int
    columns: dict[str, bytes]
    status: str
    fields: dict[str, Any]
    extra: dict[str, _Column]


class _Group(msgspec.Struct):
    """prompt: BLAKE2b of its token ids; finished, begun: index of a response -> its samples."""

    number: int
    prompt: bytes
    finished: dict[int, list[PackedSample]]
    begun: dict[int, list[PackedSample]]
    baseline: float | None


#: what else a sample holds, as it is
FIELDS = sorted(
    {f.name for f in dataclasses.fields(Sample)} - {"group", "index", "response_length", "status", "extra", *REQUIRED}
)
_fields = attrgetter(*FIELDS)


def encode(held: Held) -> bytes:
    """A group as bytes.  TypeError and the like for what msgpack does not know."""
    every = lambda several: {index: [pack(sample) for sample in samples] for index, samples in several.items()}  # noqa: E731
    baseline = None if math.isnan(held.baseline) else held.baseline
    return msgspec.msgpack.encode(
        _Group(held.number, _name(held.group), every(held.finished), every(held.begun), baseline)
    )


def decode(data: bytes, group: Group) -> Held:
    """The group of these bytes.  HpcrlError if it is damaged, or of another group or prompt."""
    try:
        file = msgspec.msgpack.decode(data, type=_Group)
        if (file.number, file.prompt) != (group.number, _name(group)):
            raise HpcrlError(f"it is of group {file.number} with another prompt")
        every = lambda several: {i: [unpack(sample) for sample in samples] for i, samples in several.items()}  # noqa: E731
        begun = {index: tuple(samples) for index, samples in every(file.begun).items()}
        return Held(group, every(file.finished), begun, math.nan if file.baseline is None else file.baseline)
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
        raise HpcrlError(f"it is damaged: {type(error).__name__}: {error}") from error


def _name(group: Group) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(group.prompt.tokens, "<i4").tobytes(), digest_size=16).digest()


def pack(sample: Sample) -> PackedSample:
    """A sample as it is written."""
    columns = {name: np.ascontiguousarray(getattr(sample, name), dtype).tobytes() for name, dtype in REQUIRED.items()}
    extra = {
        name: _Column(array.dtype.str, list(array.shape), np.ascontiguousarray(array).tobytes())
        for name, array in sample.extra.items()
    }
    fields = dict(zip(FIELDS, _fields(sample), strict=True))
    return PackedSample(sample.group, sample.index, sample.response_length, columns, sample.status, fields, extra)


def unpack(packed: PackedSample) -> Sample:
    """The sample again.  ValueError, KeyError or TypeError if it is none."""
    columns = {name: np.frombuffer(packed.columns[name], dtype).copy() for name, dtype in REQUIRED.items()}
    count = packed.response_length
    if (
        not len(columns["loss_mask"])
        == len(columns["logprobs"])
        == len(columns["versions"])
        == count
        <= len(columns["tokens"])
    ):
        raise ValueError(f"the columns of sample {packed.index} have other lengths than its response of {count} tokens")
    fields = {name: value for name, value in packed.fields.items() if name in FIELDS}
    extra = {name: _array(column) for name, column in packed.extra.items()}
    return Sample(
        packed.group, packed.index, response_length=count, status=packed.status, **columns, **fields, extra=extra
    )


def _array(column: _Column) -> np.ndarray:
    dtype = np.dtype(column.dtype)
    if dtype.hasobject:
        raise ValueError(f"a column of {dtype}")
    return np.frombuffer(column.data, dtype).reshape(column.shape).copy()
