"""Which sample is trained on which rank in which micro-batch: a pure function of lengths.

Invariants: every sample is in exactly one micro-batch; a micro-batch holds at most max_tokens_per_gpu x CP tokens, or
one longer sample alone; in every optimizer step all data-parallel ranks have the same number of micro-batches, a
multiple of what the pipeline asks for, none empty; the same lengths give the same schedule.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heapreplace
from itertools import accumulate, pairwise

from hpcrl.errors import UsageError

MicroBatch = tuple[int, ...]
FEW = 8  #: samples a micro-batch up to which a second way to pack is worth its time; of more, small ones fill any gap


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
    step_samples: Sequence[int] | None = None,
    max_tokens_per_gpu: int | None = None,
    micro_batch_size: int = 1,
    multiple: int = 1,
    balance: bool = True,
) -> Schedule:
    """Schedule samples of `lengths` tokens: step i takes the i-th part of them, in order.

    Args:
        step_samples: how many each step takes, where that is not the same for all.
        max_tokens_per_gpu: tokens of a micro-batch and CP rank; None: micro-batches have at most micro_batch_size
            samples.
        multiple: what divides the micro-batches of a rank in a step (virtual pipeline stages need it).
        balance: give all ranks about as many tokens; if False, samples go to the ranks in turn, whatever their length.

    Raises:
        UsageError: if the samples do not divide into steps, a step's samples into ranks, or a rank's samples by
            `multiple`.
    """
    size = len(lengths) // num_steps
    counts = [size] * num_steps if step_samples is None else list(step_samples)
    if sum(counts) != len(lengths) or any(count == 0 or count % dp for count in counts):
        raise UsageError(
            f"{len(lengths)} samples in {num_steps} optimizer steps over {dp} data-parallel ranks do not divide",
            "choose --rollout-batch-size x --n-samples-per-prompt as a multiple of steps x ranks",
        )
    if any(count // dp % multiple for count in counts):
        raise UsageError(
            f"{counts[0] // dp} samples of a data-parallel rank in one optimizer step cannot be divided by {multiple}",
            "virtual pipeline stages need a multiple of --pipeline-model-parallel-size",
        )
    steps = []
    for first, size in zip(accumulate(counts, initial=0), counts, strict=False):
        sizes = lengths[first : first + size]
        if max_tokens_per_gpu is None:
            ranks = _fixed(sizes, dp, micro_batch_size, multiple, balance)
        else:
            ranks = _packed(sizes, dp, max_tokens_per_gpu * cp, multiple, balance)
        steps.append([tuple(tuple(first + i for i in sorted(micro)) for micro in rank) for rank in ranks])
    return Schedule(tuple(tuple(step[rank] for step in steps) for rank in range(dp)))


def _fixed(sizes: Sequence[int], dp: int, most: int, multiple: int, balance: bool) -> list[list[list[int]]]:
    """Ranks get as many samples each, in as few micro-batches as `most` samples in one allow, of as many samples or one
    less."""
    each = len(sizes) // dp
    count = _up(-(-each // most), multiple)
    ranks = spread(sizes, dp, each) if balance else [list(range(rank, len(sizes), dp)) for rank in range(dp)]
    cuts = [each * i // count for i in range(count + 1)]
    return [[sorted(own)[a:b] for a, b in pairwise(cuts)] for own in ranks]


def _packed(sizes: Sequence[int], dp: int, limit: int, multiple: int, balance: bool) -> list[list[list[int]]]:
    """As few micro-batches a rank as hold all samples within `limit` tokens, of about as many tokens each.

    Balanced: all samples into dp x m micro-batches of about equal sum, m of them to a rank; else each rank its own
    samples into m.  m grows until nothing exceeds the limit, which is certain for one sample each.
    """
    parts = [list(range(len(sizes)))] if balance else [list(range(rank, len(sizes), dp)) for rank in range(dp)]
    parts = [sorted(part, key=sizes.__getitem__, reverse=True) for part in parts]
    over = dp // len(parts)  # ranks that share the samples of one part
    most = len(sizes) // dp
    count = min(most, _up(max(-(-_first_try(sizes, part, limit) // over) for part in parts), multiple))
    while True:
        bins = [
            _longest_first(sizes, part, count * over, limit) or _best_fit(sizes, part, count * over, limit)
            for part in parts
        ]
        if all(found is not None for found in bins):
            break
        count = min(most, _up(max(count + 1, count * 101 // 100), multiple))
    if not balance:
        return [_largest_first(sizes, own) for own in bins]
    (found,) = bins
    ranks = _to_ranks([sum(sizes[i] for i in micro) for micro in found], dp, count)
    return [_largest_first(sizes, [found[number] for number in rank]) for rank in ranks]


def _to_ranks(loads: Sequence[int], dp: int, count: int) -> list[list[int]]:
    """Indices of micro-batches of these loads for every rank, `count` each: even sums, or even at each place in turn,
    whichever takes less time where ranks wait for one another at each micro-batch, and else in all."""
    return min(spread(loads, dp, count), _dealt(loads, dp), key=lambda ranks: _costs(loads, ranks))


def _dealt(loads: Sequence[int], dp: int) -> list[list[int]]:
    """The largest `dp` micro-batches one to each rank, then the next, of each `dp` the largest to the rank with the
    least so far: no other way has a smaller sum of what ranks wait for at each."""
    order = sorted(range(len(loads)), key=loads.__getitem__, reverse=True)
    found: list[list[int]] = [[] for _ in range(dp)]
    sums = [0] * dp
    for start in range(0, len(order), dp):
        for index, rank in zip(order[start : start + dp], sorted(range(dp), key=sums.__getitem__), strict=True):
            found[rank].append(index)
            sums[rank] += loads[index]
    return found


def _costs(loads: Sequence[int], ranks: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(tokens of the largest micro-batch at each place, added up; tokens of the rank that has most)."""
    columns = zip(*(sorted((loads[i] for i in rank), reverse=True) for rank in ranks), strict=True)
    return sum(max(column) for column in columns), max(sum(loads[i] for i in rank) for rank in ranks)


def _first_try(sizes: Sequence[int], order: Sequence[int], limit: int) -> int:
    """The number of micro-batches to begin with: the least; where each holds many samples, so many that it will do.

    About half the smallest sample is left over in each then, and to find that out from the least would take many tries.
    """
    least = _least(sizes, order, limit)
    if len(order) <= FEW * least:
        return least
    return max(least, int(sum(sizes[i] for i in order) / (limit - sizes[order[-1]] / 2)))


def _least(sizes: Sequence[int], order: Sequence[int], limit: int) -> int:
    """A number of micro-batches below which the samples of `order`, sorted by falling size, cannot be packed, at least
    1.

    Their sum; how many of the smallest fit into one; and that of those larger than half the limit no two share one
    (Martello and Toth 1990, lower bounds for bin packing).
    """
    filled = sum(min(sizes[i], limit) for i in order)
    together = max(1, limit // max(sizes[order[-1]], 1))
    large = sum(2 * sizes[i] > limit for i in order)
    return max(1, -(-filled // limit), -(-len(order) // together), large)


def _largest_first(sizes: Sequence[int], micros: list[list[int]]) -> list[list[int]]:
    """In the same order on all ranks, so that ranks which wait for one another at each wait least."""
    return sorted(micros, key=lambda micro: sum(sizes[i] for i in micro), reverse=True)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _longest_first(sizes: Sequence[int], order: Sequence[int], count: int, limit: int) -> list[list[int]] | None:
    """`order`, sorted by falling size, in `count` parts by longest processing time first; None if one exceeds the
    limit.

    A sample above the limit has its own part: no part may take another one.
    """
    found: list[list[int]] = [[i] for i in order[:count]]
    # one integer for (load, part), which a heap handles twice as fast as a pair; rising, so it is a heap
    heap = [sizes[i] * count + part for part, i in enumerate(order[:count])]
    heap.sort()
    full = (limit + 1) * count
    for index in order[count:]:
        loaded = heap[0] + sizes[index] * count
        if loaded >= full:  # the emptiest part cannot take it: nor can any other
            return None
        found[loaded % count].append(index)
        heapreplace(heap, loaded)
    return found


def _best_fit(sizes: Sequence[int], order: Sequence[int], count: int, limit: int) -> list[list[int]] | None:
    """`order`, sorted by falling size, in `count` parts, each sample into the fullest that can take it; None if one
    cannot.

    Less even than `_longest_first`, and now and then possible where that is not.
    """
    found: list[list[int]] = [[i] for i in order[:count]]
    loads = sorted((sizes[i], part) for part, i in enumerate(order[:count]))
    for index in order[count:]:
        at = bisect_right(loads, (limit - sizes[index], count)) - 1
        if at < 0:
            return None
        load, part = loads.pop(at)
        found[part].append(index)
        insort(loads, (load + sizes[index], part))
    return found


def spread(sizes: Sequence[int], parts: int, most: int) -> list[list[int]]:
    """Indices of `sizes` in `parts` parts of about equal sum, at most `most` in one.

    Longest processing time first (Graham 1969): each, the largest first, into the part with the least so far.
    """
    found: list[list[int]] = [[] for _ in range(parts)]
    heap = list(range(parts))  # load x parts + part
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        part = heap[0] % parts
        found[part].append(index)
        if len(found[part]) < most:
            heapreplace(heap, heap[0] + sizes[index] * parts)
        else:
            heappop(heap)
    return found
