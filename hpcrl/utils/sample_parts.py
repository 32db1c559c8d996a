"""What a sample consists of: how far it is, its columns of tokens, and what an engine counts of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

import numpy as np


class SampleStatus(StrEnum):
    """How far a sample is."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


PENDING = SampleStatus.PENDING
COMPLETED = SampleStatus.COMPLETED
TRUNCATED = SampleStatus.TRUNCATED
ABORTED = SampleStatus.ABORTED
#: of samples in a batch; FAILED is what a function may say, and is trained as COMPLETED
STATUSES = (PENDING, COMPLETED, TRUNCATED, ABORTED)
#: why an engine ended a response -> the status
ENDS = {"stop": COMPLETED, "length": TRUNCATED, "abort": ABORTED}


class TokenColumn(NamedTuple):
    """A column with one entry for each token.

    Attributes:
        dtype: of its numbers, as they are stored and sent.
        counted_by: the field of ROW that counts the tokens, "length" (prompt and response) or "response_length".
        dims: further dimensions of an entry, of the same size for all tokens.
        optional: only some runs have it, for all of their samples; it is in `SampleBatch.extra`.
    """

    dtype: np.dtype
    counted_by: str
    dims: int = 0
    optional: bool = False


#: every column of a sample; see `Sample` for what those are that all runs have
COLUMNS: dict[str, TokenColumn] = {
    "tokens": TokenColumn(np.dtype("<i4"), "length"),
    "loss_mask": TokenColumn(np.dtype("u1"), "response_length"),
    "rollout_log_probs": TokenColumn(np.dtype("<f4"), "response_length"),
    "versions": TokenColumn(np.dtype("<i4"), "response_length"),
    # float32 [response]: log-probs of the sampled tokens under a teacher, at the sampling temperature
    "teacher_log_probs": TokenColumn(np.dtype("<f4"), "response_length", optional=True),
    # uint8 [prompt + response, layers with experts, bytes]: the experts that the engine chose for each token that it
    # read; a byte an expert, two (the lower first) in a model of more than 256; a token's are all 0 where the engine
    # did not say, as of the last one, which it wrote and never read
    "rollout_routed_experts": TokenColumn(np.dtype("u1"), "length", 2, optional=True),
}
REQUIRED = {name: column for name, column in COLUMNS.items() if not column.optional}
OPTIONAL = {name: column for name, column in COLUMNS.items() if column.optional}


# ---- what an engine counts


class _Counts:
    """Numbers that answers of an engine add up to."""

    _theirs: ClassVar[dict[str, str]] = {}  # field -> its name in an answer, where that is another

    def add(self, meta_info: dict[str, Any]) -> None:
        """Count those of one answer."""
        for name, value in vars(self).items():
            setattr(self, name, value + meta_info.get(self._theirs.get(name, name), 0))

    def to_dict(self) -> dict[str, int]:
        """The fields by name."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """The counts again."""
        return cls(**{name: data.get(name, 0) for name in vars(cls())})


@dataclass
class SpecInfo(_Counts):
    """Drafted tokens.  Engines here count them themselves: these stay 0."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0
    _theirs = {"completion_token_num": "completion_tokens"}  # noqa: RUF012

    @property
    def spec_accept_rate(self) -> float:
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class PrefixCacheInfo(_Counts):
    """Prompt tokens, and those of them that an engine had in its cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0
    _theirs = {"total_prompt_tokens": "prompt_tokens"}  # noqa: RUF012

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0
