"""The making of a rollout over a sampler without engines: over-sampling, filters, partial rollout, restarts, going
back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.rollout.batch_assembly import Rollout, check_staleness
from hpcrl.rollout.engines.completion import completion_of
from hpcrl.rollout.filters import check_reward_nonzero_std
from hpcrl.rollout.filters.custom_filters import DynamicFilter, read_verdict
from hpcrl.rollout.generation.generator import RolloutGenerator
from hpcrl.rollout.generation.group_store import GroupStore
from hpcrl.rollout.ledger import bank
from hpcrl.rollout.ledger.bank import Bank
from hpcrl.rollout.ledger.group_progress import GroupProgress, fit
from hpcrl.rollout.prompts.prompt_files import Prompt, PromptFile
from hpcrl.rollout.prompts.prompt_source import Group, PromptSource
from hpcrl.rollout.samplers.sampler import GREEDY, ResponseRequest
from hpcrl.run.rundir import RunDir
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import ABORTED, COMPLETED, SampleStatus
from tests.support.ledger_account import account
from tests.support.shares import plain_sample

LENGTH = 4  #: tokens of a finished response
HERE = "tests.rollout.generation.test_batch_generator"


class FakeSampler:
    """Responses of LENGTH tokens, whose numbers say group, index and place.

    takes(asked): seconds; None: until it is told to end, with `part` tokens so far, or finished at once if it goes on
    from a part.
    """

    def __init__(self, takes: Callable[[ResponseRequest], float | None] = lambda _: 0.0, part: int = 2) -> None:
        self.takes = takes
        self.part = part
        self.asked: list[ResponseRequest] = []
        self._end = asyncio.Event()

    async def abort(self) -> None:
        self._end.set()
        await asyncio.sleep(0)
        self._end = asyncio.Event()

    async def make(self, asked: ResponseRequest) -> list[Sample]:
        self.asked.append(asked)
        old = asked.partial[0] if asked.partial else None
        have = 0 if old is None else old.response_length
        seconds = self.takes(asked)
        if seconds is None:
            await self._end.wait()
            return [self._sample(asked, old, min(have + self.part, LENGTH - 1), ABORTED)]
        await asyncio.sleep(seconds)
        return [self._sample(asked, old, LENGTH, COMPLETED)]

    def _sample(self, asked: ResponseRequest, old: Sample | None, count: int, status: str) -> Sample:
        prompt = asked.group.prompt.tokens
        have = 0 if old is None else old.response_length
        response = [1000 * asked.group.number + 10 * asked.index + i for i in range(count)]
        versions = [*([] if old is None else old.array("versions").tolist()), *[asked.version] * (count - have)]
        return Sample(
            group_index=asked.group.number,
            response_index=asked.index,
            tokens=np.asarray([*prompt.tolist(), *response], np.int32),
            response_length=count,
            loss_mask=np.ones(count, np.uint8),
            rollout_log_probs=np.full(count, -0.5, np.float32),
            versions=np.asarray(versions, np.int32),
            reward=float(asked.index if asked.group.number % 5 else 1),  # of every fifth group all alike
            status=status,
            response="x" * count,
            metadata={"n": asked.group.number},
        )


class Attempt:
    """What the rollout process does with store and generator; a checkpoint is what `step` returns."""

    def __init__(
        self, path: Path, sampler: FakeSampler, rollout: int = 0, state: Any = None, source: Any = None, **values: Any
    ) -> None:
        defaults = {"rollout_batch_size": 4, "n_samples_per_prompt": 3, "rm_type": "math"}
        self.options = Options(**(defaults | values))
        number = len(list((path / "attempts").iterdir())) if path.exists() else 0
        self.rundir = RunDir.create(path) if not path.exists() else RunDir(path, number)
        self.rundir.make_attempt()
        prompts = tuple(Prompt(i, np.asarray([i, i + 1], np.int32)) for i in range(7))
        self.source = source or PromptSource(PromptFile(Path("p.jsonl"), prompts, 0, ""), 3, True)
        self.sampler = sampler
        self.store = GroupStore(self.options, self.source, self.rundir)
        self.generator = RolloutGenerator(self.options, self.store, sampler, sampler.abort)
        self.store.restore(rollout, None if state is None else msgspec.json.decode(msgspec.json.encode(state)))

    async def make(self, rollout_id: int, version: int) -> tuple[Rollout, dict[str, float]]:
        rollout, metrics, *_ = await self.generator.make(rollout_id, version)
        check_staleness(rollout.samples(), version, self.options.staleness_bound)
        assert self.store.ledger.holds()
        return rollout, metrics

    async def step(self, rollout_id: int, version: int, saved: int = 0) -> tuple[Rollout, dict[str, float], Any]:
        rollout, metrics = await self.make(rollout_id, version)
        state = self.store.state(rollout_id)
        self.store.train(rollout_id, saved)
        return rollout, metrics, state


async def until_trained(
    attempt: Attempt, number: int, rollout_id: int, version: int
) -> tuple[Rollout, dict[str, float], int]:
    """Go on until `number` is in a batch, whatever else finishes first: that rollout, the first one's metrics, the
    version."""
    first: dict[str, float] = {}
    for later in range(8):
        rollout, metrics, _ = await attempt.step(rollout_id + later, version + later)
        first = first or metrics
        if number in numbers(rollout):
            return rollout, first, version + later
    raise AssertionError(f"group {number} is never trained")


def numbers(rollout: Rollout) -> list[int]:
    return [group.number for group in rollout.groups]


OVER = {"over_sampling_batch_size": 6}
PARTIAL = OVER | {"partial_rollout": True}


def reward_varies(args: Any, samples: list[Sample], **kwargs: Any) -> torch.Tensor:
    """As slime's guides print it: what comes back is a tensor without dimensions."""
    rewards = [sample.reward for sample in samples]
    return torch.tensor(rewards, dtype=torch.float).std() > 0.0


class Kept:
    """What an own filter may return, whatever its `keep` is."""

    def __init__(self, keep: Any) -> None:
        self.keep = keep


@pytest.mark.parametrize(
    "given", [True, np.True_, np.array(True), torch.tensor(True), torch.tensor(0.5), np.float64(2)]
)
def test_verdict_as_truth_value(given: Any) -> None:
    """A verdict without dimensions counts as its truth value."""
    no = type(given)(False) if isinstance(given, bool | np.bool_) else given * 0
    assert read_verdict(given).keep is True and read_verdict(no).keep is False
    assert read_verdict(Kept(given)).keep is True and read_verdict(Kept(no)).keep is False


@pytest.mark.parametrize("given", [None, "yes", torch.tensor([True]), np.array([True, False]), Kept(None), Kept([1])])
def test_what_is_no_verdict_is_a_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match="neither a bool nor"):
        read_verdict(given)


def test_guides_filter_keeps_and_drops() -> None:
    """The filter printed in the guides keeps and drops."""
    judge = DynamicFilter(Options(dynamic_sampling_filter_path=f"{HERE}.reward_varies")).judge
    differ, same = (
        [Sample(response_index=i, reward=reward) for i, reward in enumerate(rewards)]
        for rewards in ([0.0, 1.0], [1.0, 1.0])
    )
    assert asyncio.run(judge(0, 0, differ)).keep is True
    assert asyncio.run(judge(0, 1, same)).keep is False


FILTER = {"dynamic_sampling_filter_path": "check_reward_nonzero_std"}


def slow(*groups: int) -> Callable[[ResponseRequest], float | None]:
    """Responses of these groups do not end by themselves, at first; groups of later rollouts take longer than what goes
    on."""

    def takes(asked: ResponseRequest) -> float | None:
        number = asked.group.number
        return None if number in groups and not asked.partial else 0.0 if number < 7 else 0.1

    return takes


def test_plain_rollout_takes_the_next_groups(tmp_path: Path) -> None:
    """Without filters and over-sampling, a rollout is the next groups."""

    async def run() -> None:
        attempt = Attempt(tmp_path / "run", FakeSampler(lambda a: random.random() / 100))
        other = PromptSource(attempt.source.file, 3, True)
        for rollout_id in range(4):
            rollout, metrics, state = await attempt.step(rollout_id, rollout_id)
            assert list(rollout.groups) == other.next_groups(4) and metrics == {}
            assert [(s.group_index, s.response_index) for s in rollout.samples()] == [
                (g, i) for g in numbers(rollout) for i in range(3)
            ]
            assert {key: state[key] for key in other.state()} == other.state()
        assert account(tmp_path / "run").trained == 16 and not account(tmp_path / "run").wrong
        summary = msgspec.json.decode((tmp_path / "run" / "ledger.json").read_bytes())
        assert summary == {
            "issued": 16,
            "in_flight": 0,
            "buffer": 0,
            "bank": 0,
            "claimed": 0,
            "trained": 16,
            "dropped": {},
        }

    asyncio.run(run())


def test_over_sampling_drops_the_rest(tmp_path: Path) -> None:
    """Over-sampling takes the first groups and drops the rest."""

    async def run() -> None:
        attempt = Attempt(tmp_path / "run", FakeSampler(slow(1, 4)), **OVER)
        rollout, metrics, _ = await attempt.step(0, 0)
        assert numbers(rollout) == [0, 2, 3, 5] and metrics["rollout/groups_issued"] == 6
        rollout, _, _ = await attempt.step(1, 1)
        assert not {1, 4} & set(numbers(rollout)) and attempt.store.ledger.dropped == {"surplus": 4}
        found = account(tmp_path / "run")
        assert not found.wrong and (found.trained, found.dropped, found.following) == (8, {"surplus": 4}, 12)

    asyncio.run(run())


def test_a_filter_refuses_and_more_are_issued(tmp_path: Path) -> None:
    async def run() -> None:
        attempt = Attempt(tmp_path / "run", FakeSampler(), **FILTER)
        rollout, metrics, _ = await attempt.step(0, 0)
        assert len(numbers(rollout)) == 4 and not any(number % 5 == 0 for number in numbers(rollout))
        assert metrics["rollout/dynamic_filter/drop_zero_std_1.0"] >= 1
        assert attempt.store.ledger.dropped["zero_std_1.0"] == metrics["rollout/dynamic_filter/drop_zero_std_1.0"]

    asyncio.run(run())


def test_fallback_fills_the_batch(tmp_path: Path) -> None:
    """With a fallback, groups of equal rewards fill what is missing."""

    async def run() -> None:
        name = "check_reward_nonzero_std_with_fallback"
        attempt = Attempt(tmp_path / "run", FakeSampler(), dynamic_sampling_filter_path=name)
        rollout, metrics, _ = await attempt.step(0, 0)
        assert numbers(rollout) == [0, 1, 2, 3] and metrics["rollout/groups_issued"] == 4
        assert attempt.store.ledger.dropped == {}

    asyncio.run(run())


def test_deterministic_batch_order(tmp_path: Path) -> None:
    """In deterministic mode the batch does not depend on which group is first."""

    async def run() -> None:
        found = []
        for seed in range(4):
            chance = random.Random(seed)
            sampler = FakeSampler(lambda _, chance=chance: chance.random() / 50)
            attempt = Attempt(tmp_path / str(seed), sampler, deterministic_mode=True, **OVER, **FILTER)
            found.append([])
            for rollout_id in range(4):
                rollout, metrics, state = await attempt.step(rollout_id, rollout_id)
                found[-1].append(
                    (numbers(rollout), [s.array("tokens").tolist() for s in rollout.samples()], metrics, state)
                )
            assert not account(tmp_path / str(seed)).wrong
            assert not (tmp_path / str(seed) / "bank").exists(), "made again bit for bit, nothing need be kept"
        assert found[0] == found[1] == found[2] == found[3]
        assert all(state["ledger"]["buffer"] == state["ledger"]["bank"] == [] for *_, state in found[0])

    asyncio.run(run())


# ---- partial rollout


def test_what_is_left_over_goes_on_from_its_tokens(tmp_path: Path) -> None:
    async def run() -> None:
        attempt = Attempt(tmp_path / "run", FakeSampler(slow(1, 4)), **PARTIAL)
        await attempt.step(0, 0)
        assert attempt.store.ledger.buffer == {1, 4} and attempt.store.ledger.dropped == {}
        rollout, metrics, version = await until_trained(attempt, 4, 1, 5)
        assert metrics["rollout/groups_continued"] == 2
        sample = next(s for s in rollout.samples() if (s.group_index, s.response_index) == (4, 2))
        assert (
            sample.array("versions").tolist()[:2] == [0, 0]
            and 5 <= sample.array("versions")[2] == sample.array("versions")[3] <= version
        )
        assert sample.array("tokens")[-4:].tolist() == [4020, 4021, 4022, 4023]
        assert sample.array("loss_mask").tolist() == [1, 1, 1, 1]
        begun = [asked for asked in attempt.sampler.asked if asked.partial]
        assert sorted({(a.group.number, a.index) for a in begun}) == [(g, i) for g in (1, 4) for i in range(3)]
        assert not account(tmp_path / "run").wrong

    asyncio.run(run())


def test_surplus_groups_come_next(tmp_path: Path) -> None:
    """Finished groups beyond need are the first of the next batch."""

    async def run() -> None:
        attempt = Attempt(tmp_path / "run", FakeSampler(lambda a: 0.0 if a.group.number < 6 else 0.05), **PARTIAL)
        await attempt.step(0, 0)
        waiting = attempt.store.ledger.waiting
        assert waiting and not attempt.store.ledger.dropped
        asked = len(attempt.sampler.asked)
        rollout, _, _ = await attempt.step(1, 1)
        assert set(waiting) <= set(numbers(rollout))
        assert not {a.group.number for a in attempt.sampler.asked[asked:]} & (set(waiting) & attempt.store.ledger.bank)

    asyncio.run(run())


def test_older_policys_tokens_are_masked(tmp_path: Path) -> None:
    """Tokens of an older policy are masked on demand."""

    async def run() -> None:
        values = PARTIAL | {"mask_offpolicy_in_partial_rollout": True}
        attempt = Attempt(tmp_path / "run", FakeSampler(slow(1)), **values)
        await attempt.step(0, 0)
        rollout, _, version = await until_trained(attempt, 1, 1, 1)
        for sample in rollout.samples():
            assert sample.array("loss_mask").tolist() == [int(v == version) for v in sample.array("versions")]
            assert sample.group_index != 1 or sample.array("loss_mask").tolist()[:2] == [0, 0]

    asyncio.run(run())


def test_what_is_too_old_is_made_again(tmp_path: Path) -> None:
    async def run() -> None:
        attempt = Attempt(
            tmp_path / "run",
            FakeSampler(lambda a: None if a.group.number == 1 and a.version == 0 else 0.0),
            max_staleness=2,
            **PARTIAL,
        )
        await attempt.step(0, 0)
        rollout, _, version = await until_trained(attempt, 1, 1, 3)
        found = {v for s in rollout.samples() if s.group_index == 1 for v in s.array("versions").tolist()}
        assert len(found) == 1 and version - 2 <= found.pop() >= 3

    asyncio.run(run())


def test_ungraded_response_is_not_resampled(tmp_path: Path) -> None:
    """A response that waits for its reward is not sampled again."""

    class Graded(FakeSampler):
        async def make(self, asked: ResponseRequest) -> list[Sample]:
            if asked.partial and asked.partial[0].status == COMPLETED:
                return list(asked.partial)
            samples = await super().make(asked)
            if asked.group.number == 2:
                asked.results.extend(samples)
                await asyncio.sleep(60)  # the rest of its group never comes
            return samples

    async def run() -> None:
        attempt = Attempt(tmp_path / "run", Graded(), **PARTIAL)
        await attempt.step(0, 0)
        assert 2 in attempt.store.ledger.buffer
        rollout, _, _ = await until_trained(attempt, 2, 1, 1)
        assert {v for s in rollout.samples() if s.group_index == 2 for v in s.array("versions").tolist()} == {0}

    asyncio.run(run())


# ---- filters that misbehave, and own ones

CALLS: list[int] = []


def refuses_odd(options: Options, samples: Sequence[Sample]) -> Any:
    class Said:
        keep, reason = samples[0].group_index % 2 == 0, "odd number!"

    return Said()


def fails_once(options: Options, samples: Sequence[Sample]) -> bool:
    if samples[0].group_index == 1:
        raise ValueError("I do not like it")
    return True


def nonsense(options: Options, samples: Sequence[Sample]) -> Any:
    return "perhaps"


def wants_too_much(options: Options, samples: Sequence[Sample], more: Any) -> bool:
    return True


def newest_first(options: Options, rollout_id: int, buffer: list[list[Sample]], count: int) -> list[list[Sample]]:
    CALLS.append(rollout_id)
    buffer.sort(key=lambda samples: -samples[0].group_index)
    found = [buffer.pop(0) for _ in range(min(1, len(buffer)))]
    if buffer:
        buffer.pop()  # the oldest is given up
    return found


def breaks(options: Options, rollout_id: int, buffer: list[list[Sample]], count: int) -> Any:
    buffer.clear()
    raise KeyError("no")


def test_a_filter_may_fail_on_a_group_but_not_on_most(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        attempt = Attempt(tmp_path / "one", FakeSampler(), dynamic_sampling_filter_path=f"{HERE}.fails_once")
        rollout, metrics, _ = await attempt.step(0, 0)
        assert 1 not in numbers(rollout) and metrics["rollout/dynamic_filter/drop_filter_error"] == 1
        attempt = Attempt(tmp_path / "odd", FakeSampler(), dynamic_sampling_filter_path=f"{HERE}.refuses_odd")
        rollout, metrics, _ = await attempt.step(0, 0)
        assert not any(n % 2 for n in numbers(rollout)) and metrics["rollout/dynamic_filter/drop_odd_number_"] >= 3
        attempt = Attempt(tmp_path / "all", FakeSampler(), dynamic_sampling_filter_path=f"{HERE}.nonsense")
        with pytest.raises(
            HpcrlError,
            match="--dynamic-sampling-filter-path .*nonsense failed: .*str.* on 3 of the 3 groups of rollout 0",
        ):
            await attempt.step(0, 0)

    asyncio.run(run())
    said = capfd.readouterr().err
    assert "group 1 is dropped" in said and "I do not like" in said and "test_batch_generator.py" in said


def test_a_wrong_path_ends_the_run_at_its_start(tmp_path: Path) -> None:
    for name, value, words in (
        ("dynamic_sampling_filter_path", f"{HERE}.absent", "has no absent"),
        ("dynamic_sampling_filter_path", f"{HERE}.wants_too_much", "missing a required argument"),
        ("buffer_filter_path", f"{HERE}.refuses_odd", "too many positional arguments"),
        ("buffer_filter_path", "no_such_module.f", "cannot be imported"),
    ):
        flag = "--" + name.replace("_", "-")
        with pytest.raises(UsageError, match=f"{flag} {value}.*{words}"):
            Attempt(tmp_path / f"{value}", FakeSampler(), **PARTIAL, **{name: value})


def test_a_buffer_filter_chooses_and_gives_up(tmp_path: Path) -> None:
    async def run() -> None:
        CALLS.clear()
        values = {"over_sampling_batch_size": 8, "partial_rollout": True, "buffer_filter_path": f"{HERE}.newest_first"}
        attempt = Attempt(tmp_path / "run", FakeSampler(slow(1, 2, 3)), **values)
        await attempt.step(0, 0)
        assert attempt.store.ledger.buffer >= {1, 2, 3}
        oldest = attempt.store.ledger.waiting[0]
        await attempt.step(1, 1)
        assert (
            CALLS == [1]
            and attempt.store.ledger.dropped == {"buffer_filter": 1}
            and oldest not in attempt.store.ledger.waiting
        )
        assert not account(tmp_path / "run").wrong

    asyncio.run(run())


def test_continued_groups_know_where_they_began(tmp_path: Path) -> None:
    """What is put back has slime's `start_rollout_id` in its metadata, and keeps it; other samples have none."""

    async def run() -> None:
        attempt = Attempt(tmp_path / "run", FakeSampler(slow(1)), **PARTIAL)
        first, *_ = await attempt.step(0, 0)
        assert all("start_rollout_id" not in sample.metadata for sample in first.samples())
        begun = attempt.store.groups[1].all_samples()
        assert begun and all(sample.metadata["start_rollout_id"] == 0 for sample in begun)
        rollout, *_ = await until_trained(attempt, 1, 1, 1)
        starts = {sample.group_index: sample.metadata.get("start_rollout_id") for sample in rollout.samples()}
        assert starts[1] == 0 and None in starts.values()

    asyncio.run(run())


def test_failing_buffer_filter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A buffer filter that fails is replaced by taking the first groups."""

    async def run() -> None:
        attempt = Attempt(tmp_path / "run", FakeSampler(slow(1)), **PARTIAL, buffer_filter_path=f"{HERE}.breaks")
        await attempt.step(0, 0)
        await until_trained(attempt, 1, 1, 1)

    asyncio.run(run())
    assert "--buffer-filter-path" in capfd.readouterr().err


# ---- restarts


async def killed(attempt: Attempt, rollout_id: int, version: int, finished: int) -> None:
    """An attempt that is killed when `finished` groups of the rollout are."""
    making = asyncio.create_task(attempt.generator.make(rollout_id, version))
    while len(attempt.store.ledger.bank) < finished:
        await asyncio.sleep(0.002)
        assert not making.done()
    making.cancel()
    await asyncio.gather(making, return_exceptions=True)


def test_finished_groups_survive_a_kill(tmp_path: Path) -> None:
    """Groups that were finished when the run was killed are not made again."""

    async def run() -> None:
        path, stuck = tmp_path / "run", slow(6, 7)
        first = Attempt(path, FakeSampler(stuck))
        _, _, state = await first.step(0, 0)
        await killed(first, 1, 1, 2)
        second = Attempt(path, FakeSampler(), 1, state)
        rollout, _, state = await second.step(1, 1, saved=1)
        assert numbers(rollout) == [4, 5, 6, 7]
        assert {a.group.number for a in second.sampler.asked} == {6, 7}, "4 and 5 were on disk"
        found = account(path)
        assert not found.wrong and (found.trained, found.attempts) == (8, 2)
        await second.step(2, 2, saved=2)
        assert sorted(Bank(path / "bank").numbers()) == [8, 9, 10, 11], "what a checkpoint has learned from is not kept"

    asyncio.run(run())


def test_in_deterministic_mode_they_are_made_again(tmp_path: Path) -> None:
    async def run() -> None:
        first = Attempt(tmp_path / "run", FakeSampler(slow(6, 7)), deterministic_mode=True)
        _, _, state = await first.step(0, 0)
        await killed(first, 1, 1, 2)
        second = Attempt(tmp_path / "run", FakeSampler(), 1, state, deterministic_mode=True)
        await second.step(1, 1)
        assert {a.group.number for a in second.sampler.asked} == {4, 5, 6, 7}

    asyncio.run(run())


def test_going_back_keeps_usable_groups(tmp_path: Path) -> None:
    """Three rollouts of one policy each; back to the checkpoint after the first, which has only seen version 1."""

    async def run() -> None:
        path = tmp_path / "run"
        first = Attempt(path, FakeSampler(lambda a: None if a.group.number == 1 and a.version < 2 else 0.0), **PARTIAL)
        rollout, _, state = await first.step(0, 0)
        for rollout_id in (1, 2):
            await first.step(rollout_id, rollout_id, saved=1)
        second = Attempt(path, FakeSampler(), 1, state, **PARTIAL)
        again, _, _ = await second.step(1, 1, saved=1)
        assert not set(numbers(again)) & set(numbers(rollout)), "none trained twice"
        begun = [a for a in second.sampler.asked if a.group.number == 1]
        assert [a.partial[0].array("versions").tolist() for a in begun] == [[0, 0, 1]] * 3, (
            "what version 2 added is of another history"
        )
        assert all(v <= 1 for s in again.samples() for v in s.array("versions").tolist())
        found = account(path)
        assert not found.wrong and found.again >= 8 and found.trained == 8

    asyncio.run(run())


def test_a_lost_or_damaged_file_costs_its_group_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        path = tmp_path / "run"
        first = Attempt(path, FakeSampler(slow(1, 2, 3)), **(PARTIAL | {"over_sampling_batch_size": 7}))
        _, _, state = await first.step(0, 0)
        files = Bank(path / "bank")
        assert {1, 2, 3} <= set(files.numbers())
        lost, damaged = (next(g for g in first.store._source.again([n])) for n in (1, 2))
        kept = files.read(damaged)
        files.remove([lost.number, damaged.number])
        files.write([kept])
        data = files.path(2).read_bytes()
        files.path(2).write_bytes(data[:-7])
        second = Attempt(path, FakeSampler(slow()), 1, state, **PARTIAL)
        versions: dict[int, list[int]] = {}
        for rollout_id in (1, 2, 3):
            rollout, _, _ = await second.step(rollout_id, rollout_id)
            versions |= {s.group_index: s.array("versions").tolist() for s in rollout.samples()}
        assert 0 not in versions[1] and 0 not in versions[2] and versions[3][:2] == [0, 0]
        assert not account(path).wrong

    asyncio.run(run())
    assert "group 2 in " in capfd.readouterr().err


def test_the_greedy_response_is_asked_once(tmp_path: Path) -> None:
    async def run() -> None:
        sampler = FakeSampler(lambda a: None if a.group.number == 1 and a.index == 0 and not a.partial else 0.0)
        attempt = Attempt(tmp_path / "run", sampler, advantage_estimator="remax", **PARTIAL)
        await attempt.step(0, 0)
        rollout, _, _ = await until_trained(attempt, 1, 1, 1)
        assert all(s.baseline == s.baseline for s in rollout.samples())
        assert sum(a.index == GREEDY and a.group.number == 1 for a in sampler.asked) == 1

    asyncio.run(run())


# ---- what is held, and its file


def group(number: int = 3) -> Group:
    return Group(number, Prompt(0, np.asarray([5, 6], np.int32)))


def sample(index: int, versions: list[int], status: SampleStatus = COMPLETED, **fields: Any) -> Sample:
    own = {"group_index": 3, "response_index": index, "versions": np.asarray(versions, np.int32), "status": status}
    return plain_sample(2, len(versions), **own, **fields)


def test_a_group_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    extra = {"teacher_log_probs": np.asarray([0.5, 1.5], np.float32)}
    fields = {
        "reward": 0.5,
        "rewards": {"a": 1.0},
        "metadata": {"k": [1, None]},
        "prompt": [{"role": "user"}],
        "label": 3,
    }
    finished = {1: [sample(1, [4, 4], **extra, response="ab", **fields), sample(1, [4])]}
    held = GroupProgress(group(), finished, {0: (sample(0, [3, 4], ABORTED),)}, 0.25)
    found = bank.decode(bank.encode(held), group())
    assert msgspec.msgpack.encode(found.baseline) == msgspec.msgpack.encode(0.25)
    for old, new in zip(held.all_samples(), found.all_samples(), strict=True):
        assert old.columns().keys() == new.columns().keys()
        for a, b in zip(old.columns().values(), new.columns().values(), strict=True):
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes() and b.flags.writeable
        rest = (
            "group_index",
            "response_index",
            "status",
            "reward",
            "rewards",
            "metadata",
            "prompt",
            "label",
            "response",
            "response_length",
        )
        assert [getattr(old, name) for name in rest] == [getattr(new, name) for name in rest]
    with pytest.raises(HpcrlError, match="another prompt"):
        bank.decode(bank.encode(held), Group(3, Prompt(0, np.asarray([5, 7], np.int32))))


def test_damaged_bank_files() -> None:
    """A damaged file is always one of hpcrl's errors."""
    data = bank.encode(GroupProgress(group(), {0: [sample(0, [1, 1])]}))
    chance = random.Random(1)
    for _ in range(2000):
        broken = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        try:
            bank.decode(bytes(broken[: chance.randint(1, len(broken))] if chance.random() < 0.5 else broken), group())
        except HpcrlError:
            continue


def test_concurrent_groups_share_a_file(tmp_path: Path) -> None:
    """Groups that arrive during a write share a file, which is removed with the last of them."""

    def held(number: int, reward: float = 0.0) -> GroupProgress:
        return GroupProgress(group(number), {0: [sample(0, [1]).replace(group_index=number, reward=reward)]})

    def files() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    async def run() -> None:
        bank = Bank(tmp_path)
        await asyncio.gather(*(bank.keep(held(number)) for number in range(9)))
        assert files() == ["00000000.groups", "00000001.groups"] and bank.numbers() == list(range(9))
        assert bank.path(0) != bank.path(1) == bank.path(8)
        await bank.keep(held(8, 0.5))
        bank.remove([*range(1, 8)])
        assert files() == ["00000000.groups", "00000002.groups"], "what is written again stands in the newer file alone"
        bank.remove([0])
        await bank.keep(held(10))
        again = Bank(tmp_path)
        assert again.numbers() == [8, 10] and again.read(group(8)).finished[0][0].reward == 0.5
        assert again.read(group(0)) is None and again.read(Group(8, Prompt(0, np.asarray([7], np.int32)))) is None
        again.path(8).write_bytes(b"\xff\xff")
        last = Bank(tmp_path)
        assert last.numbers() == [10] and len(files()) == 2, "who only looks removes nothing"
        last.remove([])
        assert files() == ["00000003.groups"]

    asyncio.run(run())


def test_failed_write_reaches_all_sharers(tmp_path: Path) -> None:
    """Everyone who shares a file that cannot be written is told."""

    async def run() -> None:
        bank = Bank(tmp_path / "file" / "bank")
        (tmp_path / "file").write_text("")
        held = [GroupProgress(group(number), {0: [sample(0, [1])]}) for number in range(4)]
        found = await asyncio.gather(*(bank.keep(one) for one in held), return_exceptions=True)
        assert [type(error) for error in found] == [NotADirectoryError] * 4

    asyncio.run(run())


def test_what_cannot_be_written_is_left_out_and_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert not Bank(tmp_path).write([GroupProgress(group(), {0: [sample(0, [1], metadata={"x": object()})]})])
    assert Bank(tmp_path).numbers() == [] and "kept for a restart" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("versions", "version", "bound", "parts", "kept"),
    [
        ([4, 4, 4], 4, 0, False, "finished"),
        ([4, 4, 4], 5, 0, False, None),
        ([4, 4, 4], 5, 1, False, "finished"),
        ([4, 4, 4], 99, None, False, "finished"),
        ([4, 5, 6], 4, 0, True, 1),
        ([4, 5, 6], 5, None, True, 2),
        ([4, 5, 6], 5, 0, True, None),
        ([4, 5, 6], 4, 0, False, None),
        ([5, 5, 5], 4, None, True, None),
    ],
)
def test_what_a_policy_may_learn_from(
    versions: list[int], version: int, bound: int | None, parts: bool, kept: Any
) -> None:
    found, lost = fit(GroupProgress(group(), {0: [sample(0, versions, reward=1.0)]}), version, bound, parts)
    assert lost == (kept != "finished") and bool(found.finished) == (kept == "finished")
    if isinstance(kept, int):
        (part,) = found.partial[0]
        assert (part.response_length, part.status, part.reward, len(part.array("tokens"))) == (
            kept,
            ABORTED,
            None,
            2 + kept,
        )
    else:
        assert not found.partial


def test_columns_follow_the_response() -> None:
    """Columns of a response are cut and continued with it."""
    experts = np.arange(5 * 2 * 1, dtype=np.uint8).reshape(5, 2, 1)
    extra = {"rollout_routed_experts": experts, "teacher_log_probs": np.arange(3, dtype=np.float32)}
    found, _ = fit(GroupProgress(group(), {0: [sample(0, [4, 5, 6], **extra)]}), 5, None, parts=True)
    (part,) = found.partial[0]
    assert [len(part.array(name)) for name in extra] == [4, 2]
    begun = completion_of(part)
    assert begun.experts is not None and begun.experts.tolist() == experts[:3].tolist()
    assert begun.tokens.tolist() == part.array("tokens")[2:].tolist() and begun.status == ABORTED


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([0.0, 1.0], True), ([0.5, 0.52, 0.5], True), ([0.1, 0.3], True), ([0.3] * 4, False), ([0.3, 0.3 + 1e-9], False)],
)
def test_any_difference_of_rewards_is_kept(rewards: list[float], kept: bool) -> None:
    """A group is kept whose rewards differ, however little, but for rounding."""
    group = [plain_sample(response_index=i, reward=reward) for i, reward in enumerate(rewards)]
    found = check_reward_nonzero_std.keep(Options(), group)
    assert found.keep == kept and (kept or found.reason == "zero_std_0.3")
