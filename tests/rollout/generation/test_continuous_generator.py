"""The loop whose engines never wait, over a sampler without engines: batches, staleness, drops, stops and kills."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcrl.errors import HpcrlError
from hpcrl.rollout.batch_assembly import check_staleness
from hpcrl.rollout.engines.load import EngineMetrics
from hpcrl.rollout.generation.generator import GeneratedRollout, RolloutGenerator
from hpcrl.rollout.ledger.bank import Bank
from tests.rollout.generation.test_batch_generator import Attempt, FakeSampler, numbers
from tests.support.ledger_account import account

VALUES: dict[str, Any] = {"loop": "fully-async", "max_staleness": 2, "use_tis": True}


class Streaming(Attempt):
    """A run of `total` rollouts in the fully asynchronous loop: what the rollout process and the trainer do."""

    def __init__(
        self, path: Path, sampler: FakeSampler, rollout: int = 0, state: Any = None, total: int = 8, **values: Any
    ) -> None:
        super().__init__(path, sampler, rollout, state, **(VALUES | values))
        self.readings: list[EngineMetrics] = []
        self.stream = RolloutGenerator(self.options, self.store, sampler, sampler.abort, self.look, total)
        self.states: dict[int, Any] = {}

    async def look(self) -> list[EngineMetrics]:
        return self.readings

    async def batch(self, rollout_id: int, version: int, consumed: int) -> GeneratedRollout:
        made = await asyncio.wait_for(self.stream.make(rollout_id, version, consumed), 20)
        check_staleness(made.rollout.samples(), consumed, self.options.staleness_bound)
        assert self.store.ledger.holds()
        self.states[rollout_id] = msgspec.json.decode(msgspec.json.encode(made.state))
        return made

    async def trains(self, first: int, last: int, saved: int = 0, pause: float = 0.0) -> list[GeneratedRollout]:
        """One ahead: the batch after a rollout is asked for while it is trained on; then the weights are published."""
        found = [await self.batch(first, first, first)]
        for rollout_id in range(first, last):
            following = asyncio.create_task(self.batch(rollout_id + 1, rollout_id, rollout_id + 1))
            await asyncio.sleep(pause)
            self.store.train(rollout_id, saved)
            self.stream.trainer_is_waiting()
            self.stream.publish(rollout_id + 1)
            found.append(await following)
        self.store.train(last, saved)
        return found


def drawn(seed: int) -> FakeSampler:
    chance = random.Random(seed)
    return FakeSampler(lambda asked: chance.choice([0.0, 0.001, 0.002, 0.03]))


def test_all_groups_are_accounted_for(tmp_path: Path) -> None:
    """Batches are ready in time, and every group is accounted for."""

    async def run() -> None:
        attempt = Streaming(tmp_path / "run", drawn(1))
        made = await attempt.trains(0, 7)
        await attempt.stream.close()
        every = [number for one in made for number in numbers(one.rollout)]
        assert len(set(every)) == 8 * 4
        assert max(int(attempt.options.staleness_bound or 0), 2) == 2
        left = attempt.store.ledger
        assert left.trained == 32 and left.following == 32, "no more is issued than the run needs"
        found = account(attempt.rundir.root)
        assert not found.wrong and found.trained == 32

    asyncio.run(run())


def test_a_slow_group_is_overtaken_but_not_for_ever(tmp_path: Path) -> None:
    def takes(asked: Any) -> float:
        return 0.5 if asked.group.number == 1 else 0.0

    async def run() -> None:
        attempt = Streaming(tmp_path / "run", FakeSampler(takes))
        made = await attempt.trains(0, 4)
        await attempt.stream.close()
        (at,) = [place for place, one in enumerate(made) if 1 in numbers(one.rollout)]
        assert 1 <= at <= 2, "two versions old at most"
        assert all((s.array("versions") == 0).all() for s in made[at].rollout.samples() if s.group_index == 1)

    asyncio.run(run())


def test_a_conversation_of_many_steps_ends(tmp_path: Path) -> None:
    """No weight update begins it again: the trainer waits for it."""

    async def run() -> None:
        sampler = FakeSampler(lambda asked: 0.4 if asked.group.number == 1 else 0.0)
        attempt = Streaming(tmp_path / "run", sampler, total=33)
        made = await attempt.trains(0, 32, pause=0.02)
        await attempt.stream.close()
        (at,) = [place for place, one in enumerate(made) if 1 in numbers(one.rollout)]
        assert at <= 2
        asked = [one.index for one in sampler.asked if one.group.number == 1]
        assert sorted(asked) == sorted(set(asked)) and not attempt.store.ledger.dropped

    asyncio.run(run())


def test_refused_groups_are_made_up_for(tmp_path: Path) -> None:
    async def run() -> None:
        attempt = Streaming(tmp_path / "run", FakeSampler(), dynamic_sampling_filter_path="check_reward_nonzero_std")
        made = await attempt.trains(0, 5)
        await attempt.stream.close()
        assert all(number % 5 for one in made for number in numbers(one.rollout))
        dropped = attempt.store.ledger.dropped
        assert sum(dropped.values()) > 3 and sum(len(one.dropped) for one in made) >= 3 * 3
        assert not account(attempt.rundir.root).wrong

    asyncio.run(run())


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_early_end_loses_no_group(tmp_path: Path, stopped: bool, seed: int) -> None:
    """It goes on from the checkpoint after rollout 2; another was trained on, and more was at work."""

    async def run() -> None:
        path = tmp_path / "run"
        first = Streaming(path, drawn(seed))
        early = [*await first.trains(0, 2), await first.batch(3, 3, 3)]
        first.store.train(3, saved=3)
        await (first.stream.stop() if stopped else first.stream.close())
        second = Streaming(path, drawn(seed + 10), 3, first.states[2])
        made = await second.trains(3, 7, saved=3)
        await second.stream.close()
        every = [number for one in (*early[:3], *made) for number in numbers(one.rollout)]
        assert len(every) == len(set(every)) == 32
        ledger = second.store.ledger
        assert ledger.trained == 32 and ledger.holds()
        found = account(path)
        assert not found.wrong and found.trained == 32
        asked = {(a.group.number, a.index) for a in second.sampler.asked}
        held = {(s.group_index, s.response_index) for s in early[3].rollout.samples()}
        assert not asked & held, "what was finished is on disk, and no policy after the checkpoint made it"

    asyncio.run(run())


def test_nothing_is_being_written_after_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that goes on in the same directory meets the files of the one before."""
    begun = []
    ended = []
    write = Bank.write

    def on_a_slow_disk(bank: Bank, groups: Any) -> list[int]:
        begun.append(1)
        time.sleep(0.2)
        try:
            return write(bank, groups)
        finally:
            ended.append(1)

    async def run() -> None:
        attempt = Streaming(tmp_path / "run", FakeSampler())
        await attempt.batch(0, 0, 0)
        monkeypatch.setattr(Bank, "write", on_a_slow_disk)
        attempt.stream.publish(1)
        while not begun:
            await asyncio.sleep(0.01)
        await attempt.stream.close()
        assert len(ended) == len(begun)

    asyncio.run(run())


def test_what_was_begun_goes_on_from_its_tokens(tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "run"
        first = Streaming(path, FakeSampler(lambda asked: None if asked.group.number == 2 else 0.0))
        await first.trains(0, 1)
        await first.stream.stop()
        assert 2 in Bank(path / "bank").numbers()
        second = Streaming(path, FakeSampler(), 2, first.states[1])
        made = await second.trains(2, 3)
        await second.stream.close()
        begun = [asked for asked in second.sampler.asked if asked.group.number == 2]
        assert len(begun) == 3 and all(asked.partial[0].response_length == 2 for asked in begun)
        (sample, *_) = [s for one in made for s in one.rollout.samples() if s.group_index == 2]
        assert sample.array("versions").tolist() == [0, 0, 2, 2]

    asyncio.run(run())


def test_late_groups_are_made_again(tmp_path: Path) -> None:
    """Groups that were begun and would come too late are made again."""

    async def run() -> None:
        path = tmp_path / "run"
        first = Streaming(
            path, FakeSampler(lambda asked: None if 8 <= asked.group.number < 12 else 0.0), max_staleness=2
        )
        await first.trains(0, 1)
        await first.stream.stop()
        second = Streaming(path, FakeSampler(), 2, first.states[1], max_staleness=1)
        made = await second.trains(2, 5)
        await second.stream.close()
        assert sum(one.metrics["rollout/groups_remade"] for one in made) == 0, (
            "the store has cut what is too old before"
        )
        assert all(
            s.array("versions").min() >= 2 for one in made for s in one.rollout.samples() if 8 <= s.group_index < 12
        )
        assert not account(path).wrong

    asyncio.run(run())


def test_a_sampler_that_raises_ends_the_wait(tmp_path: Path) -> None:
    class Broken(FakeSampler):
        async def make(self, asked: Any) -> Any:
            raise HpcrlError("no engine is left")

    async def run() -> None:
        attempt = Streaming(tmp_path / "run", Broken())
        with pytest.raises(HpcrlError, match="no engine is left"):
            await attempt.batch(0, 0, 0)
        await attempt.stream.close()
        assert "4 of 4 groups" in str(attempt.stream)

    asyncio.run(run())


def test_engines_that_have_enough_get_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.rollout.generation.generator.LOOK", 0.01)

    async def run() -> None:
        attempt = Streaming(tmp_path / "run", FakeSampler(lambda _: 60.0))
        attempt.readings = [EngineMetrics(3, 30, 0.2)]
        making = asyncio.create_task(attempt.stream.make(0, 0, 0))
        await asyncio.sleep(0.1)
        issued = attempt.store.ledger.following
        assert issued == 12, "what staleness allows, before anything was read"
        assert attempt.stream._concurrency.limit == 6
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        await attempt.stream.close()

    asyncio.run(run())
