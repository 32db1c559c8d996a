"""A micro-batch as one packed row of tokens, for one rank.

Row t predicts token t + 1 of its sequence, so the log-prob of a response's token p belongs to row p - 1.  Each sequence is
padded only to what the layout needs: a multiple of 2 x CP rows, and the whole to a multiple of TP under sequence
parallelism; never to the longest.  Under CP a rank holds its zig-zag part of every sequence.

Invariant: padding rows and prompt rows have weight 0 everywhere; what a row carries depends on its own sample alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from hpcrl.sample import SampleBatch
from hpcrl.trainer.megatron import Ranks
from hpcrl.trainer.thd import cp_indices


@dataclass
class Packed:
    """One micro-batch on one rank; t rows.

    tokens, labels, positions: int64 [1, t]; mask: float32 [t], 1 where the row's prediction is trained on; advantages,
    rollout_logprobs: float32 [t], 0 where mask is; share: float32 [t], mask divided by the sample's mask sum (whatever
    rank the other tokens are on); sequence: PackedSeqParams with global boundaries; samples: samples in it;
    old_logprobs: float32 [t], or None where the training forward's own are the old ones.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    rollout_logprobs: torch.Tensor
    share: torch.Tensor
    sequence: PackedSeqParams
    samples: int
    old_logprobs: torch.Tensor | None = None


def pack(batch: SampleBatch, rows: Sequence[int], ranks: Ranks, sequence_parallel: bool) -> Packed:
    """Pack the samples `rows` of `batch` for this rank."""
    lengths = batch.rows["length"][list(rows)].astype(np.int64)
    padded = _padded(lengths, ranks, sequence_parallel)
    real, bounds = _offsets(lengths), _offsets(padded)
    total = int(bounds[-1])
    places = _spans(bounds[:-1], lengths)  # where each real token goes
    source = _spans(batch.token_offsets[list(rows)], lengths)

    tokens = np.zeros(total, np.int64)
    tokens[places] = batch.tokens[source]
    labels = np.zeros(total, np.int64)
    labels[:-1] = tokens[1:]  # a sequence's last row has no label: its mask is 0
    positions = np.arange(total) - np.repeat(bounds[:-1], padded)
    columns = _response_columns(batch, rows, lengths, bounds, total)

    part = cp_indices(bounds.tolist(), ranks.cp_size, ranks.cp_rank).numpy()
    cut = lambda array: torch.from_numpy(np.ascontiguousarray(array[part])).to(ranks.device)  # noqa: E731
    return Packed(
        cut(tokens)[None],
        cut(labels)[None],
        cut(positions)[None],
        *(cut(column) for column in columns),
        _sequence(real, bounds, padded, ranks),
        len(rows),
    )


def _padded(lengths: np.ndarray, ranks: Ranks, sequence_parallel: bool) -> np.ndarray:
    """Rows of each sequence: a multiple of what CP cuts it into; the last one fills the whole up for TP."""
    multiple = 2 * ranks.cp_size if ranks.cp_size > 1 else 1
    padded = -(-lengths // multiple) * multiple
    if sequence_parallel:
        whole = multiple * ranks.tp_size  # every CP rank's part must divide by TP
        padded[-1] += -int(padded.sum()) % whole
    return padded


def _response_columns(
    batch: SampleBatch, rows: Sequence[int], lengths: np.ndarray, bounds: np.ndarray, total: int
) -> tuple[np.ndarray, ...]:
    """mask, advantages, rollout_logprobs, share: float32 [total] each, at the rows that predict response tokens."""
    response = batch.rows["response_length"][list(rows)].astype(np.int64)
    source = _spans(batch.response_offsets[list(rows)], response)
    places = _spans(bounds[:-1] + lengths - response - 1, response)
    mask_values = batch.loss_mask[source].astype(np.float32)
    owner = np.repeat(np.arange(len(rows)), response)
    sums = np.bincount(owner, mask_values, minlength=len(rows))
    advantage = batch.rows["advantage"][list(rows)].astype(np.float32)
    values = (
        mask_values,
        advantage[owner] * mask_values,
        batch.logprobs[source] * mask_values,
        mask_values / np.maximum(sums, 1.0)[owner],
    )
    found = tuple(np.zeros(total, np.float32) for _ in values)
    for column, value in zip(found, values, strict=True):
        column[places] = value
    return found


def _sequence(real: np.ndarray, bounds: np.ndarray, padded: np.ndarray, ranks: Ranks) -> PackedSeqParams:
    as_tensor = lambda array: torch.from_numpy(array.astype(np.int32)).to(ranks.device)  # noqa: E731
    longest = int(padded.max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=as_tensor(real),
        cu_seqlens_kv=as_tensor(real),
        cu_seqlens_q_padded=as_tensor(bounds),
        cu_seqlens_kv_padded=as_tensor(bounds),
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of every span, one after another [sum of lengths]."""
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(starts, lengths) + within
