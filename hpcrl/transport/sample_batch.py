"""Samples as columns: what the trainer gets of a rollout.

Invariant: a `SampleBatch` is a handful of contiguous numpy arrays, whatever the number of samples; the wire carries
these arrays as they are (`share_format.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hpcrl.errors import DataError
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
