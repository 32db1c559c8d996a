"""The data: a sample (prompt + response), a batch of samples as columns, and a sample as bytes.

Invariants: a `SampleBatch` is a handful of contiguous numpy arrays, whatever the number of samples; the wire carries
these arrays as they are (see `transport/share_format.py`), so no per-token Python object exists between engine and
trainer. The columns are declared once, in COLUMNS, and the other fields in `Sample`; every form of bytes follows from
these two.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

import msgspec
import numpy as np

from hpcrl.errors import DataError

PENDING = "pending"
COMPLETED = "completed"
TRUNCATED = "truncated"
ABORTED = "aborted"
STATUSES = (PENDING, COMPLETED, TRUNCATED, ABORTED)


class TokenColumn(NamedTuple):
    """A column with one entry for each token.

    Attributes:
        dtype: of its numbers, as they are stored and sent.
        counted_by: the field of ROW that counts the tokens, "length" (prompt and response) or "response_length".
        dims: further dimensions of an entry, of the same size for all tokens.
        optional: only some runs have it, for all of their samples; it is in `Sample.extra` and `SampleBatch.extra`.
    """

    dtype: np.dtype
    counted_by: str
    dims: int = 0
    optional: bool = False


#: every column of a sample; see `Sample` for what those are that all runs have
COLUMNS: dict[str, TokenColumn] = {
    "tokens": TokenColumn(np.dtype("<i4"), "length"),
    "loss_mask": TokenColumn(np.dtype("u1"), "response_length"),
    "logprobs": TokenColumn(np.dtype("<f4"), "response_length"),
    "versions": TokenColumn(np.dtype("<i4"), "response_length"),
    # float32 [response]: log-probs of the sampled tokens under a teacher, at the sampling temperature
    "teacher_logprobs": TokenColumn(np.dtype("<f4"), "response_length", optional=True),
    # uint8 [prompt + response, layers with experts, bytes]: the experts that the engine chose for each token that it
    # read; a byte an expert, two (the lower first) in a model of more than 256; a token's are all 0 where the engine
    # did not say, as of the last one, which it wrote and never read
    "routed_experts": TokenColumn(np.dtype("u1"), "length", 2, optional=True),
}
REQUIRED = {name: column for name, column in COLUMNS.items() if not column.optional}
OPTIONAL = {name: column for name, column in COLUMNS.items() if column.optional}


@dataclass
class Sample:
    """One prompt with one response.

    Attributes:
        tokens: int32 [prompt + response].
        loss_mask: uint8 [response].
        logprobs: float32 [response], log-probabilities of the sampled tokens under the policy that sampled them, at the
            sampling temperature.
        versions: int32 [response], the policy version that each token was sampled under. `group` numbers the prompt
            over the whole run, `index` the response within its group.
        baseline: the reward of the greedy response to the same prompt, NaN where none was asked for. prompt, label and
            metadata are the prompt file's.
        rewards: the parts of the reward by name, where it has several.
        grading: "" or how it failed, "timeout" or "error" (then the reward is 0; in a rollout it trains nothing and
            counts in no group).
        grading_error: the reason.
        extra: columns of OPTIONAL, by name.
        teacher_error: "" or why a teacher gave no log-probs (then they are the sample's own).
        remove_sample: it is out of the loss; its reward counts in its group.
        transcript: of a response of several turns, or that a sandbox was used for: what
            `hpcrl.rollout.samplers.transcript` makes.
    """

    group: int
    index: int
    tokens: np.ndarray
    response_length: int
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reward: float = 0.0
    baseline: float = math.nan
    status: str = PENDING
    prompt: Any = None
    response: str = ""
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, float] = field(default_factory=dict)
    grading: str = ""
    grading_error: str = ""
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    teacher_error: str = ""
    remove_sample: bool = False
    transcript: dict[str, Any] = field(default_factory=dict)

    def columns(self) -> dict[str, np.ndarray]:
        """The columns that it has, by name, in the order of COLUMNS."""
        extra = {name: self.extra[name] for name in OPTIONAL if name in self.extra}
        return {name: getattr(self, name) for name in REQUIRED} | extra

    def misfit(self) -> str:
        """What is wrong with the sizes of its columns; "" if they fit its tokens and its response."""
        sizes = {"length": len(self.tokens), "response_length": self.response_length}
        if not 0 <= self.response_length <= len(self.tokens):
            return f"a response of {self.response_length} tokens, {len(self.tokens)} of prompt and response"
        for name, column in self.columns().items():
            if len(column) != sizes[COLUMNS[name].counted_by]:
                return f"{len(column)} {name} for {sizes[COLUMNS[name].counted_by]} tokens"
        return ""


#: one row a sample; what the trainer needs to know of it besides the token columns
ROW = np.dtype(
    [
        ("group", "<i8"),
        ("index", "<i4"),
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
        loss_mask: uint8, logprobs: float32, versions: int32, each [sum of response_length]; all in row order.
        extra: columns of OPTIONAL, by name.
    """

    rows: np.ndarray
    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
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
                s.group,
                s.index,
                len(s.tokens),
                s.response_length,
                int(np.count_nonzero(s.loss_mask)),
                STATUSES.index(s.status),
                s.reward,
                s.baseline,
            )
            for s in samples
        ]
        columns = {name: _join([getattr(s, name) for s in samples], kind.dtype) for name, kind in REQUIRED.items()}
        extra = {name: _join([s.extra[name] for s in samples], OPTIONAL[name].dtype) for name in _optional(samples)}
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
    keys = rows[["group", "index"]]
    return np.cumsum(np.concatenate([[False], keys[1:] != keys[:-1]])[: len(rows)], dtype=np.int64)


def whole_responses(rows: np.ndarray) -> np.ndarray:
    """Rows whose `trained` are of single samples, with those of whole responses."""
    numbers = responses_of(rows)
    rows["trained"] = np.bincount(numbers, rows["trained"])[numbers] if len(rows) else 0
    return rows


def _optional(samples: list[Sample]) -> list[str]:
    """Names of the optional columns that all samples have, in the order of OPTIONAL."""
    found = set(samples[0].extra) if samples else set()
    for sample in samples:
        if other := found.symmetric_difference(sample.extra):
            raise DataError(
                f"some samples of a batch have {min(other)}, sample {sample.index} of group {sample.group} differs"
            )
    return [name for name in OPTIONAL if name in found]


def _join(parts: list[np.ndarray], kind: np.typing.DTypeLike) -> np.ndarray:
    return np.concatenate([np.asarray(p, kind) for p in parts]) if parts else np.zeros(0, kind)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


# ---- a sample as bytes

#: what a sample holds besides its columns -> its type
FIELDS = {
    f.name: kind
    for f, kind in zip(dataclasses.fields(Sample), get_type_hints(Sample).values(), strict=True)
    if f.name not in {"extra", *COLUMNS}
}


def struct_of(name: str, without: Collection[str], **options: Any) -> type[msgspec.Struct]:
    """A message with the FIELDS of a sample except for those `without`; all have a default.

    Args:
        options: of msgspec.defstruct.
    """
    defaults = {
        f.name: msgspec.field(default_factory=f.default_factory) if callable(f.default_factory) else f.default
        for f in dataclasses.fields(Sample)
    }
    kinds = {"metadata": dict}  # of a user's function, whose keys may be numbers
    fields = [(key, kinds.get(key, kind), defaults[key]) for key, kind in FIELDS.items() if key not in without]
    return msgspec.defstruct(name, fields, module=__name__, **options)


_HEAD = ("group", "index", "response_length", "status")
_PackedFields: Any = struct_of("_PackedFields", _HEAD)
_packed_fields = attrgetter(*_PackedFields.__struct_fields__)


class _PackedColumn(msgspec.Struct):
    """A column of `Sample.extra`."""

    dtype: str
    shape: list[int]
    data: bytes


class PackedSample(msgspec.Struct):
    """A sample as msgspec writes it: in files, and to other processes.

    Attributes:
        columns: bytes of those of REQUIRED, or none of them.
        fields: the other FIELDS of `Sample`.
    """

    group: int
    index: int
    response_length: int
    columns: dict[str, bytes]
    status: str
    fields: _PackedFields
    extra: dict[str, _PackedColumn]


def pack(sample: Sample, columns: bool = True) -> PackedSample:
    """A sample as it is written.

    Args:
        columns: whether those are too that have an entry for each token.
    """
    fields = _PackedFields(*_packed_fields(sample))
    own, extra = {}, {}
    if columns:
        own = {
            name: np.ascontiguousarray(getattr(sample, name), kind.dtype).tobytes() for name, kind in REQUIRED.items()
        }
        extra = {
            name: _PackedColumn(column.dtype.str, list(column.shape), np.ascontiguousarray(column).tobytes())
            for name, column in sample.extra.items()
        }
    return PackedSample(sample.group, sample.index, sample.response_length, own, sample.status, fields, extra)


def unpack(packed: PackedSample, columns: bool = True) -> Sample:
    """The sample again.

    Args:
        columns: False where `pack` was asked for none; those of REQUIRED are empty then.

    Raises:
        ValueError, KeyError, TypeError: if it is none.
    """
    own = {name: _array(packed.columns[name] if columns else b"", kind.dtype) for name, kind in REQUIRED.items()}
    sample = Sample(
        group=packed.group,
        index=packed.index,
        response_length=packed.response_length,
        status=packed.status,
        extra={name: _array(c.data, np.dtype(c.dtype)).reshape(c.shape) for name, c in packed.extra.items()},
        **own,
        **msgspec.structs.asdict(packed.fields),
    )
    if columns and (misfit := sample.misfit()):
        raise ValueError(f"sample {packed.index} has {misfit}")
    return sample


def _array(data: bytes, dtype: np.dtype) -> np.ndarray:
    if dtype.hasobject:
        raise ValueError(f"a column of {dtype}")
    return np.frombuffer(data, dtype).copy()
