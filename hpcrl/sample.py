"""The data: a sample (prompt + response), and a batch of samples as columns.

Invariant: a `SampleBatch` is a handful of contiguous numpy arrays, whatever the number of samples; the wire carries
these arrays as they lie (see `queue/share_format.py`), so no per-token Python object exists between engine and trainer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PENDING, COMPLETED, TRUNCATED, ABORTED = "pending", "completed", "truncated", "aborted"
STATUSES = (PENDING, COMPLETED, TRUNCATED, ABORTED)


@dataclass
class Sample:
    """One prompt with one response.

    tokens: int32 [prompt + response]; loss_mask: uint8 [response]; logprobs: float32 [response], log-probabilities of
    the sampled tokens under the policy that sampled them, at the sampling temperature; versions: int32 [response], the
    policy version that each token was sampled under.  `group` numbers the prompt over the whole run, `index` the
    response within its group.  baseline: the reward of the greedy response to the same prompt, NaN where none was asked for.
    prompt, label and metadata are the prompt file's.  rewards: the parts of the reward by name, where it has several.
    grading: "" or how it failed, "timeout" or "error" (then the reward is 0); grading_error: the reason.
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


#: one row a sample; what the trainer needs to know of it besides the token columns
ROW = np.dtype(
    [
        ("group", "<i8"),
        ("index", "<i4"),
        ("length", "<i4"),  # prompt + response
        ("response_length", "<i4"),
        ("status", "<i4"),  # position in STATUSES
        ("reward", "<f8"),
        ("baseline", "<f8"),  # NaN: none
    ]
)


@dataclass
class SampleBatch:
    """Samples as columns.

    rows: ROW [n]; tokens: int32 [sum of length]; loss_mask: uint8, logprobs: float32, versions: int32, each
    [sum of response_length]; all in row order.
    """

    rows: np.ndarray
    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, samples: list[Sample]) -> SampleBatch:
        """Columns of `samples`, in their order."""
        rows = [
            (s.group, s.index, len(s.tokens), s.response_length, STATUSES.index(s.status), s.reward, s.baseline) for s in samples
        ]
        return cls(
            np.array(rows, ROW),
            _join([s.tokens for s in samples], np.int32),
            _join([s.loss_mask for s in samples], np.uint8),
            _join([s.logprobs for s in samples], np.float32),
            _join([s.versions for s in samples], np.int32),
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
        cut = lambda column, at, kind: _join([column[at[i] : at[i + 1]] for i in indices], kind)  # noqa: E731
        return SampleBatch(
            self.rows[np.asarray(indices, dtype=np.int64)],
            cut(self.tokens, t, np.int32),
            cut(self.loss_mask, r, np.uint8),
            cut(self.logprobs, r, np.float32),
            cut(self.versions, r, np.int32),
        )


def _join(parts: list[np.ndarray], kind: type) -> np.ndarray:
    return np.concatenate([np.asarray(p, kind) for p in parts]) if parts else np.zeros(0, kind)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
