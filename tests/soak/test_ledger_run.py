"""A real run with over-sampling, a filter and partial rollout, killed twice, its engine once: where every group is. And
many groups through one process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tracemalloc
from pathlib import Path

import psutil
import pytest

from tests.rollout.generation.test_batch_generator import Attempt, FakeSampler
from tests.support.ledger_account import account
from tests.support.runs import POLICY, Run, all_gone, metrics, recipe, role_pid, rows, samples

pytestmark = pytest.mark.soak
ROLLOUTS = 12
#: responses of up to 40 tokens, so that a batch of the first six of ten leaves something over; checkpoints every second
#: rollout
VALUES = POLICY | {
    "deterministic_mode": False,
    "num_rollout": ROLLOUTS,
    "rollout_batch_size": 6,
    "over_sampling_batch_size": 10,
    "dynamic_sampling_filter_path": "check_reward_nonzero_std",
    "partial_rollout": True,
    "rollout_max_response_len": 40,
    "max_staleness": 4,
    "save_interval": 1,
}


@pytest.mark.vllm
def test_whole_run_killed_twice(tmp_path: Path) -> None:
    """A whole run that is killed twice accounts for every group."""
    from tests.support.runs import make_task

    task = make_task(tmp_path / "task")
    root = tmp_path / "run"
    run = Run(recipe(tmp_path, task, **(VALUES | {"run_dir": str(root)})), root=root)
    for steps in (2, 6):
        run.until(lambda run=run, steps=steps: run.steps() >= steps)
        pids = run.pids()
        os.kill(run.process.pid, signal.SIGKILL)
        run.end()
        assert run.steps() < ROLLOUTS and all_gone(root, pids)
        run = Run("--resume", root, root=root)
    run.until(lambda: run.steps() >= 8)
    psutil.Process(role_pid(root, "hpcrl.engine.server")).children()[
        -1
    ].kill()  # in the middle of what is made next; another incarnation of it is given the weights
    status, out = run.end(400)
    assert status == 0, out + run.logs()
    found = account(root)
    assert not found.wrong, found.wrong
    assert found.attempts == 3 and found.trained == ROLLOUTS * 6
    assert found.following == found.trained + found.buffer + found.bank + sum(found.dropped.values())
    steps = metrics(root)
    assert list(steps) == list(range(ROLLOUTS))
    name = "train/train_rollout_logprob_abs_diff"
    assert max(row[name] for row in steps.values() if name in row) <= 1e-5, "tokens of the current policy"
    assert max(row["staleness/max"] for row in rows(root) if "staleness/max" in row) <= 4
    lines = [line for name, data in samples(root).items() if name[0].isdigit() for line in data.splitlines()]
    assert len(lines) == ROLLOUTS * 6 * 4
    print(
        found, {name: [row.get(name) for row in steps.values()] for name in ("staleness/max", "rollout/groups_issued")}
    )


@pytest.mark.parametrize(("files", "groups"), [(False, 100_000), (True, 10_000)])
def test_memory_stays_flat_over_many_groups(tmp_path: Path, files: bool, groups: int) -> None:
    """The whole making of rollouts, with and without files: what a process holds after a fifth of the groups, and after
    all of them."""

    async def run() -> list[int]:
        sampler = FakeSampler(lambda asked: 0.0 if asked.group.number % 50 or asked.partial else None)
        values = {
            "rollout_batch_size": 64,
            "over_sampling_batch_size": 80,
            "n_samples_per_prompt": 2,
            "partial_rollout": True,
        }
        attempt = Attempt(tmp_path / "run", sampler, **values)
        attempt.store._kept = files
        sizes, rollout_id = [], 0
        tracemalloc.start()
        while attempt.store.ledger.following < groups:
            await attempt.step(rollout_id, rollout_id, saved=rollout_id)
            sampler.asked.clear()
            rollout_id += 1
            if len(sizes) < attempt.store.ledger.following // (groups // 5):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert attempt.store.ledger.holds()
        return sizes

    sizes = asyncio.run(run())
    print([f"{size / 1e6:.2f} MB" for size in sizes])
    assert sizes[-1] - sizes[0] < 500_000
    if files:
        assert len(list((tmp_path / "run" / "bank").iterdir())) < 500
    assert not account(tmp_path / "run").wrong
