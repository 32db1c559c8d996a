"""The data: a sample (prompt + response), and a batch of samples as columns.

Invariant: a `SampleBatch` is a handful of contiguous numpy arrays, whatever the number of samples; the wire carries
these arrays as they lie (see `queue/share_format.py`), so no per-token Python object exists between engine and trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hpcrl.errors import DataError

PENDING = "pending"
COMPLETED = "completed"
TRUNCATED = "truncated"
ABORTED = "aborted"
STATUSES = (PENDING, COMPLETED, TRUNCATED, ABORTED)


class TokenColumn(NamedTuple):
    """A column with one entry for each token: dtype of its numbers; of: the field of ROW that counts the tokens,
    "length" (prompt and response) or "response_length"; dims: further dimensions of an entry, of the same size for all
    tokens."""

    dtype: np.dtype
    of: str
    dims: int = 0


#: columns that every sample has, and the dtypes in which they are stored and sent; see `Sample` for what they are
REQUIRED: dict[str, np.dtype] = {
    "tokens": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "logprobs": np.dtype("<f4"),
    "versions": np.dtype("<i4"),
}

#: columns that only some runs have, for all of their samples; they lie in `Sample.extra` and `SampleBatch.extra`
OPTIONAL: dict[str, TokenColumn] = {
    # float32 [response]: log-probs of the sampled tokens under a teacher, at the sampling temperature
    "teacher_logprobs": TokenColumn(np.dtype("<f4"), "response_length"),
    # uint8 [prompt + response, layers with experts, bytes]: the experts that the engine chose for each token that it
    # read; a byte an expert, two (the lower first) in a model of more than 256; a token's are all 0 where the engine
    # did not say, as of the last one, which it wrote and never read
    "routed_experts": TokenColumn(np.dtype("u1"), "length", 2),
}


@dataclass
class Sample:
    """One prompt with one response.

    tokens: int32 [prompt + response]; loss_mask: uint8 [response]; logprobs: float32 [response], log-probabilities of
    the sampled tokens under the policy that sampled them, at the sampling temperature; versions: int32 [response], the
    policy version that each token was sampled under.  `group` numbers the prompt over the whole run, `index` the
    response within its group.  baseline: the reward of the greedy response to the same prompt, NaN where none was asked
    for. prompt, label and metadata are the prompt file's.  rewards: the parts of the reward by name, where it has
    several.
    grading: "" or how it failed, "timeout" or "error" (then the reward is 0); grading_error: the reason.
    extra: columns of OPTIONAL, by name.  teacher_error: "" or why a teacher gave no log-probs (then they are the
    sample's own).
    remove_sample: it is out of the loss; its reward counts in its group.
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


#: one row a sample; what the trainer needs to know of it besides the token columns
ROW = np.dtype(
    [
        ("group", "<i8"),
        ("index", "<i4"),
        ("length", "<i4"),  # prompt + response
        ("response_length", "<i4"),
        ("trained", "<i8"),  # trained tokens (mask sum) of the response that it is of, all its samples together
        ("status", "<i4"),  # position in STATUSES; PENDING: it fills an optimizer step up and counts nowhere
        ("reward", "<f8"),
        ("baseline", "<f8"),  # NaN: none
    ]
)


@dataclass
class SampleBatch:
    """Samples as columns.

    rows: ROW [n]; tokens: int32 [sum of length]; loss_mask: uint8, logprobs: float32, versions: int32, each
    [sum of response_length]; all in row order.  extra: columns of OPTIONAL, by name.
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
    def of(cls, samples: list[Sample]) -> SampleBatch:
        """Columns of `samples`, in their order.  DataError if some have an optional column and others have not."""
        rows = [
            (
                s.group,
                s.index,
                len(s.tokens),
                s.response_length,
                int(s.loss_mask.sum()),
                STATUSES.index(s.status),
                s.reward,
                s.baseline,
            )
            for s in samples
        ]
        return cls(
            _whole_responses(np.array(rows, ROW)),
            _join([s.tokens for s in samples], np.int32),
            _join([s.loss_mask for s in samples], np.uint8),
            _join([s.logprobs for s in samples], np.float32),
            _join([s.versions for s in samples], np.int32),
            {name: _join([s.extra[name] for s in samples], OPTIONAL[name].dtype) for name in _optional(samples)},
        )

    @property
    def token_offsets(self) -> np.ndarray:
        """int64 [n + 1]: where each sample's tokens begin and end."""
        return _offsets(self.rows["length"])

    @property
    def response_offsets(self) -> np.ndarray:
        """int64 [n + 1]: where each sample's response columns begin and end."""
        return _offsets(self.rows["response_length"])

    def take(self, indices: list[int] | np.ndarray) -> SampleBatch:
        """The samples at `indices`, in that order, as a new batch."""
        t, r = self.token_offsets, self.response_offsets
        cut = lambda column, at, kind: _join([column[at[i] : at[i + 1]] for i in indices] or [column[:0]], kind)  # noqa: E731
        return SampleBatch(
            self.rows[np.asarray(indices, dtype=np.int64)],
            cut(self.tokens, t, np.int32),
            cut(self.loss_mask, r, np.uint8),
            cut(self.logprobs, r, np.float32),
            cut(self.versions, r, np.int32),
            {name: cut(column, self.offsets_of(name), OPTIONAL[name].dtype) for name, column in self.extra.items()},
        )

    def offsets_of(self, name: str) -> np.ndarray:
        """int64 [n + 1]: where each sample's part of an optional column begins and ends."""
        return _offsets(self.rows[OPTIONAL[name].of])


def responses_of(rows: np.ndarray) -> np.ndarray:
    """int64 [n], numbered from 0: which response each row is of.  The samples of one response stand together."""
    keys = rows[["group", "index"]]
    return np.cumsum(np.concatenate([[False], keys[1:] != keys[:-1]])[: len(rows)], dtype=np.int64)


def _whole_responses(rows: np.ndarray) -> np.ndarray:
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
