"""Which sample is trained on which rank in which micro-batch: a pure function of lengths.

Invariants: every sample is in exactly one micro-batch; a micro-batch holds at most max_tokens_per_gpu x CP tokens, or one
longer sample alone; in every optimizer step all data-parallel ranks have the same number of micro-batches, none empty;
the same lengths give the same schedule.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcrl.errors import UsageError

MicroBatch = tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """steps[data-parallel rank][optimizer step][micro-batch] -> sample indices in the whole batch, ascending."""

    steps: tuple[tuple[tuple[MicroBatch, ...], ...], ...]


def make_schedule(
    lengths: Sequence[int],
    *,
    dp: int,
    cp: int = 1,
    num_steps: int = 1,
    max_tokens_per_gpu: int | None = None,
    micro_batch_size: int = 1,
) -> Schedule:
    """Schedule samples of `lengths` tokens: step i takes the i-th part of them, in order.

    max_tokens_per_gpu None: micro-batches of micro_batch_size samples each.
    UsageError if the samples do not divide into steps, or a step's samples into ranks.
    """
    size, rest = divmod(len(lengths), num_steps)
    if rest or size == 0 or size % dp:
        raise UsageError(
            f"{len(lengths)} samples in {num_steps} optimizer steps over {dp} data-parallel ranks do not divide",
            "choose --rollout-batch-size x --n-samples-per-prompt as a multiple of steps x ranks",
        )
    steps = []
    for number in range(num_steps):
        members = range(number * size, (number + 1) * size)
        if max_tokens_per_gpu is None:
            steps.append(_fixed(lengths, members, dp, micro_batch_size))
        else:
            steps.append(_packed(lengths, members, dp, max_tokens_per_gpu * cp))
    return Schedule(tuple(tuple(step[rank] for step in steps) for rank in range(dp)))


def _fixed(lengths: Sequence[int], members: range, dp: int, size: int) -> list[tuple[MicroBatch, ...]]:
    """Ranks get as many samples each, of about as many tokens, in micro-batches of `size` samples."""
    ranks = spread([lengths[i] for i in members], dp, len(members) // dp)
    found = []
    for rank in ranks:
        own = sorted(members[i] for i in rank)
        found.append(tuple(tuple(own[at : at + size]) for at in range(0, len(own), size)))
    return found


def _packed(lengths: Sequence[int], members: range, dp: int, limit: int) -> list[tuple[MicroBatch, ...]]:
    """As few micro-batches a rank as hold all samples within `limit` tokens, of about as many tokens each."""
    sizes = [lengths[i] for i in members]
    most = len(members) // dp
    each = min(most, max(1, math.ceil(sum(min(s, limit) for s in sizes) / (limit * dp))))
    while True:
        bins = spread(sizes, each * dp, len(members))
        if each == most or all(len(b) == 1 or sum(sizes[i] for i in b) <= limit for b in bins):
            break
        each = min(most, max(each + 1, each * 101 // 100))
    ranks = spread([sum(sizes[i] for i in b) for b in bins], dp, each)
    return [tuple(sorted(tuple(sorted(members[i] for i in bins[b])) for b in rank)) for rank in ranks]


def spread(sizes: Sequence[int], parts: int, most: int) -> list[list[int]]:
    """Indices of `sizes` in `parts` parts of about equal sum, at most `most` in one.

    Longest processing time first (Graham 1969): each, the largest first, into the part with the least so far.
    """
    found: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, part = heapq.heappop(loads)
        found[part].append(index)
        if len(found[part]) < most:
            heapq.heappush(loads, (load + sizes[index], part))
    return found
