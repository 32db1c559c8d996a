"""A rollout that a function of the user's makes: what it gets, what it may return, and what becomes of the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.config.plugin_points import load_own
from hpcrl.config.rules.option_rules import check_options
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.rollout.generation.custom_generator import CustomGenerator
from tests.rollout.generation.test_batch_generator import Attempt, FakeSampler, Options, numbers
from tests.support.ledger_account import account
from tests.support.options import GRPO

HERE = "tests.rollout.generation.test_custom_generator"


async def every_second(options: Any, rollout_id: int, data_source: Any, *, evaluation: bool) -> Any:
    groups = await data_source.get_samples(2 * options.rollout_batch_size)
    assert [[sample.status for sample in group] for group in groups] == [["pending"] * 3] * 8 and not evaluation
    done = await asyncio.gather(*(data_source.generate_group(group) for group in groups))
    again = await data_source.generate(done[0][0])
    assert again == [done[0][0]]
    return SimpleNamespace(samples=list(done)[::-2], metrics={"mine": rollout_id, "rollout/other": 1.5})


async def plain(options: Any, rollout_id: int, data_source: Any, **more: Any) -> Any:
    groups = await data_source.get_samples(options.rollout_batch_size)
    return [await data_source.generate_group(group) for group in groups]


async def spoilt(options: Any, rollout_id: int, data_source: Any, **more: Any) -> Any:
    """As --name says."""
    how = options.name
    groups = await plain(options, rollout_id, data_source)
    changes: dict[str, Any] = {
        "few": lambda: groups[1:],
        "nothing": lambda: None,
        "twice": lambda: [groups[0], *groups[:-1]],
        "pending": lambda: [[groups[0][0].replace(status="pending"), *groups[0][1:]], *groups[1:]],
        "nan": lambda: [[groups[0][0].replace(reward=float("nan")), *groups[0][1:]], *groups[1:]],
        "missing": lambda: [groups[0][1:], *groups[1:]],
        "strange": lambda: [[sample.replace(group_index=99) for sample in groups[0]], *groups[1:]],
        "metrics": lambda: SimpleNamespace(samples=groups, metrics={"a": "text"}),
        "raises": lambda: groups[0][0].nothing,
    }
    return changes[how]()


def attempt(path: Path, function_name: str, **values: Any) -> Attempt:
    values |= {"rollout_function_path": f"{HERE}.{function_name}"}
    found = Attempt(path, FakeSampler(), **values)
    function = load_own("rollout_function_path", f"{HERE}.{function_name}")
    found.generator = CustomGenerator(found.options, found.store, found.sampler, function)  # type: ignore[assignment]
    return found


def test_it_chooses_among_what_it_was_given(tmp_path: Path) -> None:
    async def run() -> None:
        one = attempt(tmp_path / "run", "every_second")
        rollout, metrics, state = await one.step(0, 0)
        assert numbers(rollout) == [1, 3, 5, 7] and metrics == {"rollout/mine": 0.0, "rollout/other": 1.5}
        assert [(s.group_index, s.response_index) for s in rollout.samples()] == [
            (g, i) for g in (1, 3, 5, 7) for i in range(3)
        ]
        rollout, metrics, _ = await one.step(1, 1)
        assert numbers(rollout) == [9, 11, 13, 15]
        found = account(tmp_path / "run")
        assert found.trained == 8 and found.dropped == {"unused": 8} and not found.wrong
        one.store.close()
        again = attempt(tmp_path / "run", "every_second", rollout=1, state=state)
        rollout, _, _ = await again.step(1, 1)
        assert numbers(rollout) == [9, 11, 13, 15], "a run that goes on goes on with the next prompts"

    asyncio.run(run())


def test_without_choice_it_is_the_usual_rollout(tmp_path: Path) -> None:
    async def run() -> None:
        usual = Attempt(tmp_path / "a", FakeSampler())
        own = attempt(tmp_path / "b", "plain")
        for rollout_id in range(3):
            one, _, state = await usual.step(rollout_id, rollout_id)
            other, _, own_state = await own.step(rollout_id, rollout_id)
            assert numbers(one) == numbers(other) and state == own_state
            for a, b in zip(one.samples(), other.samples(), strict=True):
                assert a.array("tokens").tolist() == b.array("tokens").tolist() and a.reward == b.reward

    asyncio.run(run())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("few", "returned list of 3, expected a list of 4 groups"),
        ("nothing", "NoneType, expected a list"),
        ("twice", "a group twice"),
        ("pending", "status=pending, response_length=4): it must"),
        ("nan", "the reward to nan"),
        ("missing", "returned of group 0 the responses 1, 2, not all 3"),
        ("strange", "it was not given"),
        ("metrics", "metric 'a', returned 'text'"),
        ("raises", "raised AttributeError: 'Sample' object"),
    ],
)
def test_what_it_returns_is_checked(tmp_path: Path, how: str, words: str) -> None:
    with pytest.raises(HpcrlError) as caught:
        asyncio.run(attempt(tmp_path / "run", "spoilt", name=how).make(0, 0))
    assert words in str(caught.value) and str(caught.value).startswith(f"--rollout-function-path {HERE}.spoilt")


def test_other_batch_options_have_no_effect() -> None:
    """Other ways to fill a batch have no effect with a custom generator."""
    with pytest.raises(
        UsageError, match="--over-sampling-batch-size has no effect here: --rollout-function-path makes the rollout"
    ):
        check_options(Options(**GRPO, rollout_function_path="m.f", over_sampling_batch_size=64))
