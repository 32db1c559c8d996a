"""A reward that is edited between two attempts: the run goes on with the one that it was begun with, unless it is told
otherwise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import NO_AGENT, POLICY, REPO, Run, all_gone, metrics, recipe

pytestmark = pytest.mark.vllm

REWARD = """\
import asyncio
from values import VALUE


async def reward(options, sample):
    await asyncio.sleep(0.2)
    return VALUE
"""


def rewards(root: Path) -> list[float]:
    return [row["rollout/reward"] for row in metrics(root).values()]


def test_a_resumed_run_keeps_its_reward(tmp_path: Path, task: Path) -> None:
    """Stopped and resumed, it grades with the copy of an imported module that was edited since; with --live-code with
    the edited one."""
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "values.py").write_text("VALUE = 0.25\n")
    root = tmp_path / "run"
    more = {"custom_rm_path": "mine.reward", "num_rollout": 10, "rollout_max_response_len": 4, "run_dir": str(root)}
    path = recipe(tmp_path, task, **(POLICY | NO_AGENT | more))
    run = Run(path, root=root)
    run.end_early(1, signal.SIGTERM)
    (tmp_path / "values.py").write_text("VALUE = 0.75\n")
    first = run.steps()
    Run("--resume", root, root=root).end_early(first + 1, signal.SIGTERM)
    second = run.steps()
    assert set(rewards(root)) == {0.25}
    command = [sys.executable, "-m", "hpcrl", "resume", str(root), "--live-code"]
    env = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr + run.logs()
    assert rewards(root) == [0.25] * second + [0.75] * (10 - second) and second < 10
    assert all_gone(root, [])
