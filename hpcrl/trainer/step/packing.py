"""A micro-batch as one packed row of tokens, for one rank.

Row t predicts token t + 1 of its sequence, so the log-prob of a response's token p belongs to row p - 1.  Each sequence is
padded only to what the layout needs: a multiple of 2 x CP rows, and the whole to a multiple of TP under sequence
parallelism; never to the longest.  Under CP a rank holds its zig-zag part of every sequence.

Invariants: only rows that predict an unmasked response token are listed in `rows`, so that padding and prompts cannot
count anywhere; what is known of a row depends on its own sample alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcrl.errors import DataError
from hpcrl.sample import SampleBatch
from hpcrl.trainer.megatron.thd import cp_indices

if TYPE_CHECKING:
    from hpcrl.trainer.parallel.parallel_state import Ranks


@dataclass
class Packed:
    """One micro-batch on one rank: t rows, of which r are trained on.

    tokens, positions: int64 [1, t].  rows: int64 [r], the rows that predict a token of loss mask 1; for each of
    them labels: int64 [r], the token; advantages, rollout_logprobs: float32 [r]; share: float32 [r], 1 / the sample's
    mask sum, whatever rank its other tokens are on; old_logprobs: float32 [r], or None where the training forward's own
    are the old ones.  bounds: int32 [samples + 1], where each sequence ends with its padding, over all CP ranks; ends: the
    same on the host; longest: rows of the longest, with padding.  r may be 0.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    labels: torch.Tensor
    advantages: torch.Tensor
    rollout_logprobs: torch.Tensor
    share: torch.Tensor
    bounds: torch.Tensor
    ends: tuple[int, ...]
    longest: int
    old_logprobs: torch.Tensor | None = None

    @property
    def samples(self) -> int:
        """Samples in it, of which each CP rank has a part."""
        return len(self.ends) - 1


def check_batch(batch: SampleBatch, vocab_size: int) -> None:
    """DataError for what cannot be trained on: a response without a prompt, a token that the model does not have."""
    bare = batch.rows["response_length"] >= batch.rows["length"]
    if bare.any():
        row = batch.rows[int(bare.argmax())]
        raise DataError(f"sample {row['index']} of group {row['group']} has no prompt: nothing predicts its first token")
    if len(batch.tokens) and int(batch.tokens.max()) >= vocab_size:
        raise DataError(
            f"token id {int(batch.tokens.max())} is outside the model's vocabulary of {vocab_size}",
            "use the tokenizer of --hf-checkpoint",
        )


def pack(batch: SampleBatch, rows: Sequence[int], ranks: Ranks, sequence_parallel: bool) -> Packed:
    """Pack the samples `rows` of `batch` for this rank."""
    rows = np.asarray(rows, np.int64)
    lengths = batch.rows["length"][rows].astype(np.int64)
    padded = _padded(lengths, ranks, sequence_parallel)
    bounds = _offsets(padded)
    tokens = np.zeros(int(bounds[-1]), np.int64)
    tokens[_spans(bounds[:-1], lengths)] = batch.tokens[_spans(batch.token_offsets[rows], lengths)]
    positions = np.arange(len(tokens)) - np.repeat(bounds[:-1], padded)
    places, columns = _trained(batch, rows, bounds[:-1] + lengths)
    labels = tokens[places + 1]
    if ranks.cp_size > 1:
        part = cp_indices(bounds.tolist(), ranks.cp_size, ranks.cp_rank).numpy()
        at = np.full(len(tokens), -1)  # which of this rank's rows a row is
        at[part] = np.arange(len(part))
        kept = at[places] >= 0
        places, labels, *columns = (column[kept] for column in (at[places], labels, *columns))
        tokens, positions = tokens[part], positions[part]
    put = lambda array: torch.from_numpy(array).to(ranks.device)  # noqa: E731
    rows_of_it = (put(tokens)[None], put(positions)[None], put(places), put(labels), *map(put, columns))
    return Packed(*rows_of_it, put(bounds.astype(np.int32)), tuple(bounds.tolist()), int(padded.max()))


def _padded(lengths: np.ndarray, ranks: Ranks, sequence_parallel: bool) -> np.ndarray:
    """Rows of each sequence: a multiple of what CP cuts it into; the last one fills the whole up for TP."""
    multiple = 2 * ranks.cp_size if ranks.cp_size > 1 else 1
    padded = -(-lengths // multiple) * multiple
    if sequence_parallel:
        padded[-1] += -int(padded.sum()) % (multiple * ranks.tp_size)  # every CP rank's part must divide by TP
    return padded


def _trained(batch: SampleBatch, rows: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Rows that predict a response token of loss mask 1, int64 [r], and their advantages, log-probs and shares, float32 [r].

    ends: where each sample's real tokens end.
    """
    response = batch.rows["response_length"][rows].astype(np.int64)
    source = _spans(batch.response_offsets[rows], response)
    kept = batch.loss_mask[source] != 0
    owner = np.repeat(np.arange(len(rows)), response)[kept]
    counts = np.bincount(owner, minlength=len(rows))
    columns = [batch.rows["advantage"][rows][owner], batch.logprobs[source[kept]], 1.0 / counts[owner]]
    return _spans(ends - response - 1, response)[kept], [column.astype(np.float32) for column in columns]


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of every span, one after another [sum of lengths]."""
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(starts, lengths) + within
