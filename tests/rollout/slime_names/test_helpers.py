"""Small things that functions written for slime import."""

from __future__ import annotations

import asyncio

import pytest

from hpcrl.rollout.slime_names.helpers import run
from hpcrl.rollout.slime_names.http import RequestRefused


def test_coroutines_run_within_a_running_loop() -> None:
    async def one() -> int:
        return 1

    async def outer() -> int:
        return run(one())

    assert run(one()) == 1 and asyncio.run(outer()) == 1
    with pytest.raises(RuntimeError, match="await it"):
        run(outer())


def test_a_refusal_does_not_tell_the_key() -> None:
    assert "hpcrl-" not in str(RequestRefused("http://10.0.0.1:5555/hpcrl-a_B-1/generate", 400, "too long"))
