"""The real rollout process, killed twice in the middle of a rollout, with an engine that dies: where every group is at
the end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.rollout.ledger.bank import Bank
from tests.rollout.test_main import EACH, GROUPS, Attempt, model  # noqa: F401  (a fixture)
from tests.support.fake_engine import CUT, FakeEngine, partial
from tests.support.ledger_account import account

pytestmark = pytest.mark.process
#: the rest of a batch is kept; groups whose rewards are all alike are refused
VALUES: dict[str, Any] = {
    "deterministic_mode": False,
    "over_sampling_batch_size": GROUPS + 3,
    "dynamic_sampling_filter_path": "check_reward_nonzero_std",
    "partial_rollout": True,
    "eval_interval": None,
    "eval_prompt_data": [],
}


def sluggish(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
    """Every ninth response takes half a second, unless it is aborted: then it has one token."""

    async def answer() -> dict[str, Any] | None:
        try:
            await asyncio.wait_for(engine.aborted(body["request_id"]), 0.5)
        except TimeoutError:
            return None
        return partial(body, 1)

    return answer() if count % 9 == 4 else None


def dying(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
    """As `sluggish`, until it is gone."""
    engine.healthy = count < 20
    return sluggish(engine, count, body) if count < 20 else CUT


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def killed_while_making(attempt: Attempt, rollout_id: int, state: dict[str, Any]) -> None:
    """Kill -9 once a group that the checkpoint does not know is on disk."""
    bank = attempt.rundir.root / "bank"
    known = state["ledger"]["following"]
    attempt.call("generate", rollout_id=rollout_id, version=rollout_id)
    until(lambda: any(number >= known for number in Bank(bank).numbers()))
    attempt.process.kill()
    attempt.process.wait(60)


def test_run_killed_twice(tmp_path: Path, model: Path) -> None:  # noqa: F811
    """A run that is killed twice accounts for every group."""
    path = tmp_path / "run"
    with Attempt(path, model, sluggish, dying, **VALUES) as first:
        first.begin()
        for rollout_id in (0, 1):
            _, state = first.step(rollout_id, saved=0)
        killed_while_making(first, 2, state)
    with Attempt(path, model, sluggish, sluggish, **VALUES) as second:
        second.begin(2, state)
        _, after_two = second.step(2, saved=2)
        _, state = second.step(3, saved=2)
        killed_while_making(second, 4, state)
    with Attempt(path, model, sluggish, sluggish, **VALUES) as third:
        third.begin(3, after_two)  # the checkpoint after rollout 3 is lost: that one is made again
        for rollout_id in (3, 4):
            third.step(rollout_id, saved=rollout_id)
        third.call("finish", rollout_id=5)
        assert third.end() == 0, third.log.read_text()
        samples = third.samples()

    found = account(path)
    assert not found.wrong, found.wrong
    assert (found.attempts, found.trained) == (3, 5 * GROUPS) and found.again >= GROUPS
    assert found.following == found.trained + found.buffer + found.bank + sum(found.dropped.values())
    rows = [row for name in sorted(samples) for row in samples[name]]
    trained = [(row["group"], row["index"]) for row in rows]
    assert len(rows) == 5 * GROUPS * EACH == len(set(trained)), "nothing is trained twice"
    summary = json.loads((path / "ledger.json").read_text())
    assert (summary["issued"], summary["trained"]) == (found.following, found.trained)
    assert summary["dropped"] == found.dropped and summary["buffer"] + summary["bank"] == found.buffer + found.bank
    assert any(len(row["versions"]) > 1 for row in rows) or found.buffer, "responses went on under a later policy"
    log = "".join(file.read_text() for file in sorted(path.glob("rollout*.log")))
    assert "died" in log
    assert "came after the checkpoint" in log
