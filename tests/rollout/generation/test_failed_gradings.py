"""Groups of which gradings, or generations, failed: what a filter sees of them, which are dropped, and what replaces
these."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.rollout.samplers.sampler import GREEDY, ResponseRequest
from hpcrl.sample import Sample
from tests.rollout.generation.test_batch_generator import FILTER, OVER, PARTIAL, Attempt, FakeSampler, numbers
from tests.rollout.generation.test_continuous_generator import Streaming
from tests.support.ledger_account import account

DROPPED = "rollout/dynamic_filter/drop_too_few_graded"
FAILED = {(1, 0), (1, 2), (2, 1), (5, 0), (6, 0), (6, 1), (6, 2)}  #: (group, response); of 1 and 6 too few are left


class HalfGraded(FakeSampler):
    """Some of whose gradings fail."""

    def __init__(self, fails: Callable[[int, int], bool] = lambda group, index: (group, index) in FAILED) -> None:
        super().__init__()
        self.fails = fails

    async def make(self, asked: ResponseRequest) -> list[Sample]:
        found = await super().make(asked)
        failed = self.fails(asked.group.number, asked.index)
        return [one.replace(reward=0.0, grading="timeout") if failed else one for one in found]


@pytest.mark.parametrize("values", [{}, {"deterministic_mode": True}, FILTER, OVER, PARTIAL], ids=str)
def test_ungraded_groups_are_replaced(tmp_path: Path, values: dict[str, Any]) -> None:
    """A group with fewer than two graded responses is dropped and counted; the rollout has all of its groups."""

    async def run() -> None:
        attempt = Attempt(tmp_path / "run", HalfGraded(), **values)
        plain = values in ({}, {"deterministic_mode": True})
        taken: list[int] = []
        for rollout_id in range(2):
            rollout, metrics, _ = await attempt.step(rollout_id, rollout_id)
            assert len(numbers(rollout)) == 4
            taken += numbers(rollout)
            if rollout_id == 0 or plain:
                assert metrics[DROPPED] == 1 or (values is FILTER and metrics[DROPPED] == 2)
        assert not {1, 6} & set(taken) and 2 in taken
        assert 5 not in taken or values is not FILTER, "the filter does not see the reward of a failed grading"
        if plain:
            assert taken == [0, 2, 3, 4, 5, 7, 8, 9], "one more group for each that is dropped"
        assert attempt.store.ledger.dropped["too_few_graded"] == 2
        assert not account(tmp_path / "run").wrong

    asyncio.run(run())


def test_they_are_made_up_for_in_flight(tmp_path: Path) -> None:
    """Where groups are in flight all the time, each batch is whole too, and what it lost is counted."""

    async def run() -> None:
        attempt = Streaming(tmp_path / "run", HalfGraded())
        made = await attempt.trains(0, 4)
        await attempt.stream.close()
        assert {len(numbers(one.rollout)) for one in made} == {4}
        taken = [number for one in made for number in numbers(one.rollout)]
        assert not {1, 6} & set(taken) and attempt.store.ledger.dropped["too_few_graded"] == 2
        assert sum(one.metrics.get(DROPPED, 0) for one in made) == 2
        assert not account(attempt.rundir.root).wrong

    asyncio.run(run())


def test_a_resumed_run_drops_the_same(tmp_path: Path) -> None:
    """In deterministic mode a run that resumes takes the groups that it would have taken."""

    async def run() -> None:
        first = Attempt(tmp_path / "run", HalfGraded(), deterministic_mode=True)
        _, _, state = await first.step(0, 0)
        through, counted, after = await first.step(1, 1)
        again = Attempt(tmp_path / "run", HalfGraded(), 1, state, deterministic_mode=True)
        resumed, metrics, found = await again.step(1, 1)
        assert numbers(resumed) == numbers(through) == [5, 7, 8, 9]
        assert metrics == counted and found == after

    asyncio.run(run())


def test_saved_groups_are_taken_as_they_are(tmp_path: Path) -> None:
    """A replay trains on the groups of its file, whose choice was made when they were."""

    async def run() -> None:
        attempt = Attempt(tmp_path / "run", HalfGraded(), load_debug_rollout_data="{rollout_id}", num_rollout=1)
        rollout, _, _ = await attempt.step(0, 0)
        assert numbers(rollout) == [0, 1, 2, 3]

    asyncio.run(run())


def test_a_failed_greedy_response_is_no_baseline(tmp_path: Path) -> None:
    """A group whose greedy response was not graded has nothing to be compared with."""

    async def run() -> None:
        attempt = Attempt(
            tmp_path / "run",
            HalfGraded(lambda group, index: (group, index) == (2, GREEDY)),
            advantage_estimator="remax",
            n_samples_per_prompt=1,
        )
        rollout, metrics, _ = await attempt.step(0, 0)
        assert numbers(rollout) == [0, 1, 3, 4] and metrics[DROPPED] == 1

    asyncio.run(run())


def test_one_response_a_prompt_is_enough(tmp_path: Path) -> None:
    """Where a group has one response, it counts if that was graded."""

    async def run() -> None:
        attempt = Attempt(tmp_path / "run", HalfGraded(lambda group, _: group == 3), n_samples_per_prompt=1)
        rollout, metrics, _ = await attempt.step(0, 0)
        assert numbers(rollout) == [0, 1, 2, 4] and metrics[DROPPED] == 1

    asyncio.run(run())
