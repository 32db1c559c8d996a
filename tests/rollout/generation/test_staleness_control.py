"""The pacing of the loop whose engines never wait: nothing too old is ever trained on, and it never stands still."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.rollout.engines.load import FULL, ConcurrencyLimit, EngineMetrics, parse
from hpcrl.rollout.generation.batch_policies import StalenessControl


def issue(pacing: StalenessControl, numbers: Iterable[int]) -> None:
    for number in numbers:
        assert pacing.issue(number)


class Loop:
    """Trainer, engines and pacing of a run, one event after another, in an order drawn by a seed.

    A group takes a random time, some a very long one; weights are published after every `interval` batches, and reach
    the engines late.
    """

    def __init__(self, pacing: StalenessControl, interval: int, chance: random.Random, refuses: float) -> None:
        self.pacing = pacing
        self.interval = interval
        self.chance = chance
        self.refuses = refuses
        self.version = 0  # of the trainer
        self.real = 0  # of the engines; what the pacing knows may be older
        self.begun: dict[int, int] = {}  # at work -> version of its first token
        self.lasts: dict[int, int] = {}
        self.next = 0
        self.trained: list[tuple[int, int]] = []  # (number, how old it was)
        self.lost: set[int] = set()
        self.oldest: dict[int, int] = {}

    def step(self) -> bool:
        """One thing that can happen; False if nothing can but time going by."""
        if (count := self.pacing.due()) > 0:
            count = self.chance.randint(1, count)
            numbers = range(self.next, self.next + count)
            self.next += count
            for number in numbers:
                assert self.pacing.issue(number)
                self.begun[number] = self.oldest[number] = self.real
                self.lasts[number] = self.chance.choice([1, 1, 2, 3, 40])
            return True
        return False

    def tick(self) -> None:
        for number in list(self.begun):
            self.lasts[number] -= 1
            if self.lasts[number] <= 0:
                del self.begun[number]
                if self.chance.random() < self.refuses:
                    self.pacing.refuse(number, "no")
                    self.lost.add(number)
                else:
                    self.pacing.keep(number)

    def take(self) -> bool:
        """The trainer asks for its next batch."""
        batch = self.pacing.batch()
        if batch is None:
            return False
        for number in batch.groups:
            self.trained.append((number, self.pacing.following - self.oldest[number]))
        self.pacing.took(batch)
        return True


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    wanted=st.integers(1, 6),
    steps=st.integers(1, 3),
    interval=st.integers(1, 2),
    more=st.integers(0, 5),
    ahead=st.booleans(),
    refuses=st.sampled_from([0.0, 0.3]),
)
def test_random_runs_keep_the_bound(
    seed: int, wanted: int, steps: int, interval: int, more: int, ahead: bool, refuses: float
) -> None:
    """ahead: the batch after this one is asked for while this one is trained on."""
    chance = random.Random(seed)
    bound = interval * steps + more
    loop = Loop(StalenessControl(wanted, bound, steps), interval, chance, refuses)
    batches = done = waited = 0
    while done < 12:
        moved = loop.step()
        if batches < done + 1 + ahead and loop.take():
            batches += 1
            moved = True
        elif batches > done and chance.random() < 0.5:  # the trainer has learned from a batch
            done += 1
            loop.version += steps
            if done % interval == 0:
                loop.real = loop.version
                loop.pacing.publish(loop.version)
            moved = True
        assert len(loop.pacing._groups) <= wanted * (bound // steps + 1)
        loop.tick()
        waited = 0 if moved else waited + 1
        assert waited < 200, "it stands still"
    ages = [age for _, age in loop.trained]
    assert max(ages) <= bound
    numbers = [number for number, _ in loop.trained]
    assert len(numbers) == len(set(numbers)), "a group is trained once"
    there = set(numbers) | loop.lost | set(loop.pacing._groups)
    assert there == set(range(loop.next)), "every group is somewhere"
    assert refuses or not loop.lost, "without a filter no group is lost"


def test_slow_groups_are_not_starved() -> None:
    """The first batch is the first to finish, and slow groups are not passed over for ever."""
    pacing = StalenessControl(wanted=2, bound=2, steps=1)
    assert pacing.due() == 6, "three batches of two: the last is two versions old"
    issue(pacing, range(6))
    for number in (5, 3):
        pacing.keep(number)
    batch = pacing.batch()
    assert batch.groups == [3, 5]
    pacing.took(batch)
    assert pacing.following == 1 and pacing.due() == 0, "four are outstanding, for versions 1 and 2"
    pacing.publish(1)
    assert pacing.due() == 2
    issue(pacing, [6, 7])
    for number in (7, 6):
        pacing.keep(number)
    assert pacing.batch() is None, "0, 1, 2 and 4 must be learned from at versions 1 and 2"
    pacing.keep(4)
    assert pacing.batch() is None
    pacing.keep(0)
    assert pacing.batch().groups == [0, 4], "the oldest first"


def test_late_groups_are_waited_for() -> None:
    """There is no batch while it would make an unfinished group too old."""
    pacing = StalenessControl(wanted=2, bound=0, steps=1)
    issue(pacing, [0, 1])
    assert pacing.due() == 0
    pacing.bound = 1
    issue(pacing, [2, 3])
    pacing.bound = 0
    pacing.keep(1)
    pacing.keep(2)
    assert pacing.batch() is None


def test_earlier_attempts_groups() -> None:
    """Groups that an earlier attempt began are continued only if they can be in time."""
    pacing = StalenessControl(wanted=1, bound=2, steps=1, following=5, engines=5)
    assert not pacing.issue(0, 2), "three versions old already"
    assert pacing.issue(1, 3) and not pacing.issue(2, 3), "the next batch has room for one"
    assert pacing.issue(3, 4) and not pacing.issue(4, 4)
    assert pacing.due() == 1


def test_steps_that_are_none_are_refused() -> None:
    pacing = StalenessControl(1, 1, 1)
    issue(pacing, [0])
    with pytest.raises(ValueError, match="already been issued"):
        issue(pacing, [0])
    pacing.keep(0)
    for number in (0, 1):
        with pytest.raises(ValueError, match="not being made"):
            pacing.keep(number)


# ---- the engines' own metrics


def test_the_limit_follows_what_the_engines_say() -> None:
    steering = ConcurrencyLimit(group=8)
    assert steering.room(10**6, 5) == 5, "nothing is known"
    steering.read([EngineMetrics(64, 0, 0.5), EngineMetrics(60, 0, 0.4)], 124)
    assert steering.limit is None
    steering.read([EngineMetrics(64, 100, 0.5), EngineMetrics(60, 40, 0.4)], 264)
    assert steering.limit == 124 + 16 and steering.room(264, 5) == 0 and steering.room(120, 5) == 2
    steering.read([EngineMetrics(64, 0, 0.5), EngineMetrics(60, 2, 0.4)], 100)
    assert steering.limit == 140, "it is not reached: nothing says that it is too low"
    steering.read([EngineMetrics(64, 0, 0.5), EngineMetrics(60, 2, 0.4)], 130)
    assert steering.limit == 156
    steering.read([EngineMetrics(20, 0, FULL), EngineMetrics(0, 0, 0.1)], 130)
    assert steering.limit == 36
    steering.read([EngineMetrics(0, 0, 1.0)], 0)
    assert steering.limit == 8, "never below what keeps an engine at work"
    steering.read([], 0)
    assert steering.limit is None


def test_what_vllm_writes_is_read() -> None:
    text = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 5e-1
"""
    assert parse(text) == EngineMetrics(7, 1, 0.5)
    assert parse("") is None and parse(text.replace("5e-1", "much")) is None
    assert parse(text.partition("vllm:kv_cache")[0]) is None
