"""The schedule: every sample once, equal counts, the token limit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.errors import UsageError
from hpcrl.microbatches import _best_fit, _dealt, _first_try, _longest_first, _to_ranks, make_schedule, spread

SHAPES = st.tuples(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 12),
    st.integers(1, 2),
    st.integers(8, 400),
    st.integers(0, 2**32),
)


@given(SHAPES, st.booleans(), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_a_schedule_keeps_its_promises(shape: tuple, packed: bool, micro: int, multiple: int, balance: bool) -> None:
    dp, steps, groups, cp, limit, seed = shape
    rng, each = random.Random(seed), groups * multiple
    lengths = [int(rng.lognormvariate(4, 1)) + 1 for _ in range(dp * steps * each)]
    args = {
        "dp": dp,
        "cp": cp,
        "num_steps": steps,
        "max_tokens_per_gpu": limit if packed else None,
        "micro_batch_size": micro,
    }
    args |= {"multiple": multiple, "balance": balance}
    found = make_schedule(lengths, **args)
    assert found == make_schedule(lengths, **args)
    size = dp * each
    for step in range(steps):
        ranks = [rank[step] for rank in found.steps]
        assert len({len(r) for r in ranks}) == 1 and len(ranks[0]) % multiple == 0
        if not balance:
            assert all(i % dp == number for number, r in enumerate(ranks) for m in r for i in m)
        assert sorted(i for r in ranks for m in r for i in m) == list(range(step * size, (step + 1) * size))
        for micro_batch in (m for r in ranks for m in r):
            assert micro_batch
            if packed:
                assert len(micro_batch) == 1 or sum(lengths[i] for i in micro_batch) <= limit * cp
            else:
                assert len(micro_batch) <= micro


def test_a_long_sample_runs_alone() -> None:
    (steps,) = make_schedule([10, 500, 10, 10], dp=1, max_tokens_per_gpu=100).steps
    assert (1,) in steps[0] and len(steps[0]) == 2


def test_long_tails_are_balanced() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.5, 0.7, 256), 256, 4096).astype(int).tolist()
    found = make_schedule(lengths, dp=8, max_tokens_per_gpu=9216)
    loads = [[sum(lengths[i] for i in micro) for micro in rank[0]] for rank in found.steps]
    makespan = sum(max(column) for column in zip(*map(sorted, loads), strict=True))
    assert makespan / (sum(lengths) / 8) <= 1.02


def test_without_balance() -> None:
    """Without balancing, a rank may get all the long samples."""
    lengths = [100, 1] * 8
    for limit in (None, 400):
        loads = {}
        for balance in (True, False):
            found = make_schedule(lengths, dp=2, max_tokens_per_gpu=limit, balance=balance)
            loads[balance] = [sum(lengths[i] for micro in rank[0] for i in micro) for rank in found.steps]
        assert max(loads[True]) - min(loads[True]) <= 4
        assert loads[False] == [800, 8]


def test_micro_batches_that_a_multiple_asks_for() -> None:
    """Three would do; four are needed, of one sample or two; and six samples a rank give no multiple of four."""
    (steps,) = make_schedule([10] * 8, dp=1, max_tokens_per_gpu=30, multiple=4).steps
    assert [len(micro) for micro in steps[0]] == [2, 2, 2, 2]
    (steps,) = make_schedule([10] * 8, dp=1, micro_batch_size=3, multiple=4).steps
    assert [len(micro) for micro in steps[0]] == [2, 2, 2, 2]
    with pytest.raises(UsageError, match="cannot be divided by 4"):
        make_schedule([10] * 6, dp=1, max_tokens_per_gpu=30, multiple=4)


def test_limit_may_be_reached() -> None:
    """A micro-batch may reach the limit and not exceed it."""
    assert make_schedule([50, 50], dp=1, max_tokens_per_gpu=100).steps == ((((0, 1),),),)
    (steps,) = make_schedule([6, 7, 3, 8, 6], dp=1, max_tokens_per_gpu=12).steps  # 6 + 6 reaches it: the rest is even
    assert [sum([6, 7, 3, 8, 6][i] for i in micro) for micro in steps[0]] == [12, 10, 8]
    assert make_schedule([50, 51], dp=1, max_tokens_per_gpu=100).steps == ((((1,), (0,)),),)


def test_context_parallel_ranks_share() -> None:
    """Context-parallel ranks hold a micro-batch together."""
    assert len(make_schedule([50, 50], dp=1, max_tokens_per_gpu=50).steps[0][0]) == 2
    assert len(make_schedule([50, 50], dp=1, cp=2, max_tokens_per_gpu=50).steps[0][0]) == 1


@pytest.mark.parametrize(
    ("lengths", "dp", "limit", "count"),
    [
        ([4096] * 512, 8, 8192, 32),  # exactly two in each
        ([6, 5, 4, 3, 2], 1, 10, 2),  # 6 4 | 5 3 2; by the emptiest alone it would be three
        ([7, 7, 7, 3, 3, 3], 1, 10, 3),
        ([60] * 6 + [40] * 6, 2, 100, 3),
        ([51] * 4, 1, 100, 4),  # no two together
    ],
)
def test_as_few_micro_batches_as_can_be(lengths: list[int], dp: int, limit: int, count: int) -> None:
    found = make_schedule(lengths, dp=dp, max_tokens_per_gpu=limit)
    assert [len(rank[0]) for rank in found.steps] == [count] * dp


@pytest.mark.parametrize("balance", [True, False])
def test_largest_micro_batch_first(balance: bool) -> None:
    """Every rank begins with its largest micro-batch."""
    rng = random.Random(3)
    lengths = [rng.randrange(1, 100) for _ in range(64)]
    for rank in make_schedule(lengths, dp=2, max_tokens_per_gpu=250, balance=balance).steps:
        loads = [sum(lengths[i] for i in micro) for micro in rank[0]]
        assert len(set(loads)) > 1 and loads == sorted(loads, reverse=True)


@pytest.mark.parametrize(("count", "dp", "steps"), [(10, 3, 1), (8, 2, 3), (0, 1, 1), (6, 4, 2)])
def test_what_does_not_divide_is_refused(count: int, dp: int, steps: int) -> None:
    with pytest.raises(UsageError, match="do not divide"):
        make_schedule([1] * count, dp=dp, num_steps=steps)


def plans(lengths: list[int], count: int, limit: int) -> bool:
    """Whether one of both ways packs the samples of one rank into `count` micro-batches."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    return any(way(lengths, order, count, limit) is not None for way in (_longest_first, _best_fit))


@settings(max_examples=300)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=24), st.integers(40, 130))
def test_no_micro_batch_more_than_needed(lengths: list[int], limit: int) -> None:
    """Of one rank: the least number from the first try on for which either way to pack succeeds."""
    (steps,) = make_schedule(lengths, dp=1, max_tokens_per_gpu=limit).steps
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    first = min(_first_try(lengths, order, limit), len(lengths))
    assert len(steps[0]) == next(count for count in range(first, len(lengths) + 1) if plans(lengths, count, limit))
    assert all(len(micro) == 1 or sum(lengths[i] for i in micro) <= limit for micro in steps[0])


@pytest.mark.parametrize("way", [_longest_first, _best_fit])
def test_each_way_to_pack_reaches_the_limit(way: Callable[..., Any]) -> None:
    """A part may hold as many tokens as the limit says, and not one more."""
    for sizes, count in (([50, 50], 1), ([60, 40, 30, 70], 2), ([1] * 100, 1)):
        order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
        found = way(sizes, order, count, 100)
        assert found is not None and sorted(i for part in found for i in part) == list(range(len(sizes)))
        assert way([*sizes[:-1], sizes[-1] + 1], order, count, 100) is None
    assert way([500, 3, 4], [0, 2, 1], 2, 100) == [[0], [2, 1]]


def test_a_second_try_adds_one_micro_batch() -> None:
    """Lengths that the least number does not hold, whichever way they are packed, and one more does; of many
    micro-batches one in a hundred more."""
    rng, found = random.Random(1), 0
    for _ in range(400):
        lengths = [rng.randint(20, 60) for _ in range(30)]
        order = sorted(range(30), key=lengths.__getitem__, reverse=True)
        first = _first_try(lengths, order, 100)
        if plans(lengths, first, 100) or not plans(lengths, first + 1, 100):
            continue
        found += 1
        (steps,) = make_schedule(lengths, dp=1, max_tokens_per_gpu=100).steps
        assert len(steps[0]) == first + 1
    assert found >= 20


def test_a_first_try_is_a_lower_bound() -> None:
    """Below it nothing can be packed: the sum, the smallest side by side, those over half the limit."""
    for lengths, limit, least in (
        ([50, 50, 50], 100, 2),
        ([50, 50, 51], 100, 2),
        ([51, 51, 51], 100, 3),
        ([34] * 6, 100, 3),
        ([100, 100, 1], 100, 3),
        ([500, 20], 100, 2),
        ([10] * 90, 100, 9),  # of many in each, about half the smallest is left over
        ([20] * 200, 1000, 4),
        ([30] * 60, 100, 20),
    ):
        order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
        assert _first_try(lengths, order, limit) == least, lengths
        (steps,) = make_schedule(lengths, dp=1, max_tokens_per_gpu=limit).steps
        assert len(steps[0]) == least


@pytest.mark.parametrize("dp", [2, 4])
def test_ranks_have_about_as_many_tokens(dp: int) -> None:
    """Of both ways to form micro-batches: no rank has much more than the others, and steps take their own samples."""
    rng = random.Random(2)
    lengths = [rng.choice([5, 10, 20, 400]) + rng.randrange(9) for _ in range(64)]
    for limit in (None, 900):
        found = make_schedule(lengths, dp=dp, num_steps=2, max_tokens_per_gpu=limit, micro_batch_size=3)
        for step in range(2):
            own = range(32 * step, 32 * step + 32)
            loads = [sum(lengths[i] for micro in rank[step] for i in micro) for rank in found.steps]
            assert sorted(i for rank in found.steps for micro in rank[step] for i in micro) == list(own)
            assert max(loads) - min(loads) <= 410


@settings(max_examples=200)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32))
def test_ranks_wait_least_for_one_another(dp: int, count: int, seed: int) -> None:
    """Where ranks wait at each micro-batch: the sum of the largest at each place is the least that these micro-batches
    allow, and never more than with even sums alone."""
    rng = random.Random(seed)
    loads = [int(rng.paretovariate(1.2) * 100) for _ in range(dp * count)]
    found = _to_ranks(loads, dp, count)
    assert sorted(i for rank in found for i in rank) == list(range(dp * count))
    assert {len(rank) for rank in found} == {count}

    def waits(ranks: list[list[int]]) -> int:
        return sum(map(max, zip(*(sorted((loads[i] for i in rank), reverse=True) for rank in ranks), strict=True)))

    def most(ranks: list[list[int]]) -> int:
        return max(sum(loads[i] for i in rank) for rank in ranks)

    even = spread(loads, dp, count)
    assert waits(found) == sum(sorted(loads, reverse=True)[::dp]) <= waits(even)
    if waits(found) == waits(even):
        assert most(found) <= most(even)


def test_an_overlong_sample_waits_with_another() -> None:
    """Two samples over the limit are of different ranks, and at the same place."""
    lengths = [300, 290, 60, 60, 50, 50, 45, 45, 40, 40]
    for rank in make_schedule(lengths, dp=2, max_tokens_per_gpu=100).steps:
        assert rank[0][0] in ((0,), (1,))


def test_the_largest_of_a_place_goes_to_the_emptiest() -> None:
    """Dealt by places, ranks come out as even as places allow."""
    assert _dealt([9, 8, 5, 1], 2) == [[0, 3], [1, 2]]
    assert _dealt([1, 9, 5, 8, 7, 2], 3) == [[1, 0], [3, 5], [4, 2]]
