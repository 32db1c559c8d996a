"""Packed sequences: which rows a rank holds, which keys each may see, how to batch them; attention over them.  Pure:
imports nothing of Megatron.  GPUs use it too: for gated delta nets, and without Transformer Engine for attention that
flash-attn does not take.

A packed micro-batch is a row of tokens; `cu` [0, end of sequence 1, end of sequence 2, ...] counts them over all
context-parallel (CP) ranks, padding included.  Under CP every sequence is cut into 2 x CP chunks and rank r holds
chunks r and 2 CP - 1 - r of each (zig-zag: causal attention then costs every rank the same).

Invariant: a plan computes the same attention and gradients however it groups the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F

from hpcrl.utils.device_copies import to_device

#: measured on one core for heads x head size = 128, in microseconds: one attention call, one row, one (query, key) pair
CALL = 150.0
ROW = 1.5
PAIR = 0.018


def cp_indices(cu: Sequence[int], cp_size: int, cp_rank: int) -> torch.Tensor:
    """Numbers of the rows that CP rank holds, in its order [rows / cp_size], int64.

    Raises:
        ValueError: if a sequence's padded length is not a multiple of 2 x cp_size (1 for cp_size 1).
    """
    if cp_size == 1:
        return torch.arange(cu[-1])
    bounds = torch.as_tensor(cu, dtype=torch.int64)
    starts = bounds[:-1]
    lengths = bounds[1:] - bounds[:-1]
    if (rest := lengths % (2 * cp_size)).any():
        raise ValueError(
            f"a sequence of {int(lengths[rest > 0][0])} rows cannot be cut into {2 * cp_size} equal chunks"
        )
    chunk = lengths // (2 * cp_size)
    pieces = torch.stack([starts + cp_rank * chunk, bounds[1:] - (cp_rank + 1) * chunk], dim=1).flatten()
    sizes = chunk.repeat_interleave(2)
    within = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return pieces.repeat_interleave(sizes) + within


@dataclass(frozen=True)
class LengthBucket:
    """Segments that share one attention call, each padded to the longest.

    Attributes:
        queries: rows of q [n, longest].
        keys: rows of k and v [n, longest]; padding repeats row 0 and is never looked at.
        mask: who sees whom [n, 1, queries, keys], or None for plain causal (each query sees the keys up to its own
            place).
    """

    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """The calls of attention that a packed row is cut into.

    Attributes:
        buckets: the calls.
        places: for each row of q, where the buckets' outputs, laid end to end, hold it [rows].
    """

    buckets: tuple[LengthBucket, ...]
    places: torch.Tensor

    @property
    def whole(self) -> bool:
        """One bucket that holds every row once, in order: rows need only be viewed, not gathered."""
        return len(self.buckets) == 1 and self.buckets[0].queries.numel() == self.places.numel()


@dataclass(frozen=True)
class Segment:
    """Query rows [start, start + length) of this rank, which see the first `keys` - `length` + i + 1 rows of a
    sequence."""

    start: int
    length: int
    key_start: int
    keys: int


def segments(cu: Sequence[int], cp_size: int = 1, cp_rank: int = 0) -> list[Segment]:
    """One segment for each sequence, or two (its chunks) under CP; without the empty ones."""
    found = []
    row = 0
    for start, end in pairwise(cu):
        if cp_size == 1:
            pieces = [(end - start, end - start)]
        else:
            chunk = (end - start) // (2 * cp_size)
            pieces = [(chunk, (number + 1) * chunk) for number in (cp_rank, 2 * cp_size - 1 - cp_rank)]
        for length, keys in pieces:
            if length:
                found.append(Segment(row, length, start, keys))
            row += length
    return found


def group(found: Sequence[Segment], width: int) -> list[list[Segment]]:
    """Segments that share a call: padding is bought until it costs as much as one more call.

    Args:
        width: heads x head size. Long sequences end alone, short ones together; never worse than about twice the best.
    """
    if len({(s.length, s.keys) for s in found}) <= 1:
        return [list(found)]  # nothing to pad: the order stays
    scale = width / 128

    def cost(rows: int, keys: int) -> float:
        return scale * (ROW * (rows + keys) / 2 + PAIR * rows * keys)

    groups: list[list[Segment]] = []
    waste = 0.0
    top = (0, 0)
    for segment in sorted(found, key=lambda s: (-s.keys, -s.length, s.start)):
        top = (max(top[0], segment.length), top[1])
        waste += cost(top[0], top[1]) - cost(segment.length, segment.keys)
        if not groups or waste > CALL:
            groups.append([])
            waste = 0.0
            top = (segment.length, segment.keys)
        groups[-1].append(segment)
    if len(groups) == 1:
        groups[0].sort(key=lambda s: s.start)
    return groups


def plan(
    cu: tuple[int, ...], width: int, cp_size: int = 1, cp_rank: int = 0, device: torch.device | str = "cpu"
) -> AttentionPlan:
    """How to compute causal attention of packed rows; keys are rows of all CP ranks' parts laid end to end, rank by
    rank."""
    key_rows = natural_rows(cu, cp_size)
    rows = cu[-1] // cp_size
    places = torch.empty(rows, dtype=torch.int64)
    buckets = []
    offset = 0
    for members in group(segments(cu, cp_size, cp_rank), width):
        lengths = torch.tensor([s.length for s in members])[:, None]
        keys = torch.tensor([s.keys for s in members])[:, None]
        i = torch.arange(int(lengths.max()))[None]
        j = torch.arange(int(keys.max()))[None]
        starts = torch.tensor([s.start for s in members])[:, None]
        real = i < lengths
        queries = torch.where(real, starts + i, 0)
        key_starts = torch.tensor([s.key_start for s in members])[:, None]
        sources = torch.where(j < keys, key_rows[torch.where(j < keys, key_starts + j, 0)], 0)
        mask = None if cp_size == 1 else (j[:, None] <= torch.where(real, i + keys - lengths, 0)[..., None])[:, None]
        places[queries[real]] = offset + torch.arange(real.numel()).view_as(real)[real]
        offset += real.numel()
        buckets.append(
            LengthBucket(
                to_device(queries, device),
                to_device(sources, device),
                None if mask is None else to_device(mask, device),
            )
        )
    return AttentionPlan(tuple(buckets), to_device(places, device))


def recent_plans() -> Callable[..., AttentionPlan]:
    """`plan`, which remembers those of the latest micro-batches: for the layers of one model chunk.  More of them would
    keep their masks in the device's memory."""
    return lru_cache(maxsize=4)(plan)


def natural_rows(cu: tuple[int, ...], cp_size: int) -> torch.Tensor:
    """Where natural row i is in the CP ranks' parts laid end to end."""
    order = torch.cat([cp_indices(cu, cp_size, rank) for rank in range(cp_size)])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return inverse


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """query [t, heads, d], key and value [all ranks' t, groups, d] -> [t, heads, d], as `plan` batches it."""
    shared = query.size(1) != key.size(1)
    outputs = []
    for bucket in plan.buckets:
        q = _rows(query, bucket.queries, plan.whole)
        k, v = (_rows(x, bucket.keys, plan.whole and bucket.mask is None) for x in (key, value))
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bucket.mask, is_causal=bucket.mask is None, scale=scale, enable_gqa=shared
        )
        outputs.append(o.transpose(1, 2).flatten(0, 1))  # [n * longest, heads, d]
    if plan.whole:
        return outputs[0]
    return torch.cat(outputs).index_select(0, plan.places)


def _rows(x: torch.Tensor, index: torch.Tensor, whole: bool) -> torch.Tensor:
    """Rows of x [t, h, d] as [n, h, longest, d]."""
    rows = x if whole else x.index_select(0, index.flatten())
    return rows.view(*index.shape, *x.shape[1:]).transpose(1, 2)


def by_sequence(
    rows: torch.Tensor, plan: AttentionPlan, compute: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What `compute` gives for rows [t, columns], called with whole sequences [n, longest, columns], one bucket after
    another; padding is behind a sequence, and what is computed of it is dropped. Without context parallelism.
    """
    outputs = []
    for bucket in plan.buckets:
        found = rows if plan.whole else rows.index_select(0, bucket.queries.flatten())
        outputs.append(compute(found.view(*bucket.queries.shape, -1)).flatten(0, 1))
    return outputs[0] if plan.whole else torch.cat(outputs).index_select(0, plan.places)
