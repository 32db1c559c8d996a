"""Rewards: right answers in every spelling, and no response that crashes or hangs the run."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.rollout import rewards
from hpcrl.rollout.rewards import math as math_reward
from hpcrl.rollout.rewards.math import Math, boxed, number
from hpcrl.sample import Sample


def sample(response: str, label: Any) -> Sample:
    nothing = np.zeros(1, np.int32)
    return Sample(7, 3, nothing, 1, nothing, nothing, nothing, response=response, label=label)


async def reward_nan(options: Options, sample: Sample) -> float:
    return float("nan")


async def reward_text(options: Options, sample: Sample) -> Any:
    return "good"


async def reward_raises(options: Options, sample: Sample) -> float:
    raise KeyError("answer")


async def reward_length(options: Options, sample: Sample) -> float:
    return len(sample.response) * options.rollout_temperature


def reward_blocking(options: Options, sample: Sample) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{4}.", "4"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed { 5 }", "5"),
        (r"\fbox{6}", "6"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{}", ""),
        (r"\boxed 4", None),
        ("4", None),
        ("", None),
        ("\\boxed{" * 20000, None),
        ("{}}}" * 20000, None),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\{ \boxed{8} \}", "8"),
    ],
)
def test_the_last_boxed_answer(text: str, found: str | None) -> None:
    assert boxed(text) == found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("12", 12), (" -1,234.50 ", -1234.5), ("$7$", 7), (".5", 0.5), ("5.", 5), ("+3", 3)),
        *((text, None) for text in ("1,23", "1/2", "", "-", ".", "\u0661\u0662", "1e5", "1_000", "1" * 101, "12 34", "--1")),
    ],
)
def test_plain_numbers(text: str, value: float | None) -> None:
    assert number(text) == value


@pytest.fixture(scope="module")
def compare() -> Iterator[Any]:
    """Compare answers in one event loop with one grader."""
    loop, grader = asyncio.new_event_loop(), Math(workers=1)
    yield lambda answer, label: loop.run_until_complete(grader.compare(answer, label))
    loop.run_until_complete(grader.close())
    loop.close()


@pytest.mark.parametrize(
    ("answer", "label", "value"),
    [
        ("1/2", "0.5", 1),
        (r"\frac{1}{2}", r"\frac12", 1),
        (r"2\sqrt{2}", r"\sqrt{8}", 1),
        ("(x+1)^2", "x^2+2x+1", 1),
        (r"\{1,2\}", r"\{2,1\}", 1),
        (r"12\text{ cm}", "12", 1),
        ("x", "y", 0),
        (r"\frac{1}{3}", "0.5", 0),
        ("\\frac{1}{", "7", 0),
        ("}}}{{{", "7", 0),
        ("\x00\ud83d", "7", 0),
        ("x" * 5000, "7", 0),
        ("(" * 200, "7", 0),
    ],
)
def test_symbolic_comparison(compare: Any, answer: str, label: str, value: int) -> None:
    assert compare(answer, label) == value


def test_equal_numbers_need_no_process() -> None:
    grader = Math(workers=1)
    cases = {("4", "4"): 1.0, ("4.0", "4"): 1.0, ("4", "5"): 0.0, ("", "5"): 0.0, (" x ", "x"): 1.0}
    for (answer, label), value in cases.items():
        assert asyncio.run(grader.compare(answer, label)) == value
    assert asyncio.run(grader(sample(r"it is \boxed{12}", 12))) == 1.0
    assert asyncio.run(grader(sample("it is 12", "12"))) == 0.0
    assert asyncio.run(grader(sample(r"\boxed{12}", r"see \boxed{12}"))) == 1.0
    assert all(worker._process is None for worker in grader._workers)


def test_an_answer_that_never_ends_is_wrong_and_the_next_is_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> list[float]:
        grader = Math(workers=1)
        try:
            assert await grader.compare("1/2", "0.5") == 1.0
            monkeypatch.setattr(math_reward, "SECONDS", 0.3)
            begun = time.monotonic()
            found = [await grader.compare("9^{9^{9^{9}}}", "7")]
            assert time.monotonic() - begun < 3
            monkeypatch.setattr(math_reward, "SECONDS", 30.0)
            return [*found, *await asyncio.gather(*(grader.compare("1/2", label) for label in ("0.5", "0.25", "2/4")))]
        finally:
            await grader.close()

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert asyncio.run(go()) == [0.0, 1.0, 0.0, 1.0]
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before, "the comparing process is ended"


def test_model_text_is_not_evaluated(compare: Any, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for text in (
        f"__import__('os').mkdir('{mark}')",
        f"1 + __import__('os').mkdir('{mark}')",
        f"\\text{{__import__('os').mkdir('{mark}')}}",
    ):
        assert compare(text, "7") == 0
    assert not mark.exists()


def test_a_comparing_process_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(HpcrlError, match="math-verify"):
        asyncio.run(Math(workers=1).compare("x", "y"))


def test_exact() -> None:
    grader = rewards.load_reward(Options(rm_type="exact"))
    assert asyncio.run(grader(sample(" 12\n", 12))) == 1.0
    assert asyncio.run(grader(sample("12 ", "13"))) == 0.0


def test_an_own_reward() -> None:
    options = Options(custom_rm_path=f"{__name__}.reward_length", rm_type="exact", rollout_temperature=0.5)
    grader = rewards.load_reward(options)
    assert asyncio.run(rewards.grade(grader, sample("1234", None), "p.jsonl, line 9")) == 2.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reward_nan", "returned nan"),
        ("reward_text", "returned 'good', which is no number"),
        ("reward_raises", "raised KeyError: 'answer'"),
    ],
)
def test_a_reward_that_is_none_is_named(name: str, words: str) -> None:
    grader = rewards.load_reward(Options(custom_rm_path=f"{__name__}.{name}"))
    with pytest.raises(HpcrlError) as caught:
        asyncio.run(rewards.grade(grader, sample("x", None), "p.jsonl, line 9"))
    for word in (f"{__name__}.{name}", words, "response 3 of group 7 (p.jsonl, line 9)"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("reward", "is no module.function"),
        ("no_such_module.reward", "cannot be imported"),
        (f"{__name__}.absent", "has no absent"),
        (f"{__name__}.reward_blocking", "is no async function"),
        (f"{__name__}.os", "is no async function"),
        ("tests.broken_module_for_rewards.reward", "cannot be imported"),
    ],
)
def test_an_own_reward_that_cannot_be_used_is_named(path: str, words: str) -> None:
    assert os  # a name of this module that is no function
    with pytest.raises(UsageError) as caught:
        rewards.load_reward(Options(custom_rm_path=path))
    assert f"--custom-rm-path {path}" in str(caught.value) and words in str(caught.value)


def test_no_reward_is_an_error() -> None:
    with pytest.raises(UsageError, match="--rm-type or --custom-rm-path"):
        rewards.load_reward(Options())
