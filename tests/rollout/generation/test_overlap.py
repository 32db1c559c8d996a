"""The loops in made-up time: what overlaps, and that made-up time is none of the machine's."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from hpcrl.rollout.prompts.prompt_files import Prompt
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.samplers.sampler import ResponseRequest
from tests.support.simulated_loops import CASES, LOOPS, Engines, Shares, measure, response_of
from tests.support.virtual_time import simulate


def test_virtual_time() -> None:
    """Virtual time passes at once and stands still for threads."""

    async def run() -> tuple[float, float, list[str]]:
        said: list[str] = []

        async def late() -> None:
            await asyncio.sleep(3600)
            said.append("late")

        task = asyncio.create_task(late())
        before = asyncio.get_running_loop().time()
        await asyncio.to_thread(time.sleep, 0.05)
        after = asyncio.get_running_loop().time()
        said.append("thread")
        await task
        return after - before, asyncio.get_running_loop().time() - before, said

    begun = time.monotonic()
    in_thread, whole, said = simulate(run())
    assert (in_thread, whole, said) == (0, 3600, ["thread", "late"]) and time.monotonic() - begun < 60


def test_who_waits_for_nothing_is_told() -> None:
    async def run() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="nothing is due"):
        simulate(run())


def test_pause_lengthens_a_response() -> None:
    """A pause makes a response longer and its tokens newer."""
    tokens, seconds = response_of(0, 0)

    async def run() -> tuple[float, list[int]]:
        engines = Engines(1, 2)
        prompt = Prompt(0, np.asarray([1], np.int32))
        task = asyncio.create_task(engines.make(ResponseRequest(Group(0, prompt), 0, 0, 0)))
        await asyncio.sleep(seconds / 2)
        await engines.update(5, 10.0)
        (sample,) = await task
        return asyncio.get_running_loop().time(), sample.array("versions").tolist()

    took, versions = simulate(run())
    assert took == pytest.approx(seconds + 10)
    assert len(versions) == tokens and versions == sorted(versions) and set(versions) == {0, 5}


def test_the_less_a_loop_waits_the_less_idles() -> None:
    shares: dict[tuple[str, str], Shares] = {
        (loop, side): measure(2, 6, side, loop, 10) for loop in LOOPS for side in CASES
    }
    for side in CASES:
        sync, ahead, never = (shares[loop, side] for loop in LOOPS)
        assert sync.longer > ahead.longer > never.longer and sync.engines > ahead.engines > never.engines
        assert (sync.stale, ahead.stale) == (0, 1) and never.stale <= 2
    assert shares["fully-async", "engines"].engines <= 0.05 and shares["fully-async", "trainer"].trainer <= 0.05
    assert measure(2, 6, "trainer", "async", 10) == shares["async", "trainer"]  # it repeats exactly
