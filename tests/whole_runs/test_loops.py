"""Whole runs of the asynchronous loops: one rollout ahead repeats and resumes bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hpcrl.rollout.ledger.journal import account
from tests.support.runs import POLICY, Run, all_gone, metrics, processes, recipe, rows, samples

pytestmark = pytest.mark.vllm


def start(path: Path, task: Path, **values: object) -> Run:
    path.mkdir(exist_ok=True)
    root = path / "run"
    held = {"eval_prompt_data": ["heldout", str(task / "heldout.jsonl")], "eval_interval": 3, "eval_label_key": "label"}
    return Run(recipe(path, task, **(POLICY | held | {"run_dir": str(root)} | values)), root=root)


def test_one_rollout_ahead_repeats_and_resumes_bit_for_bit(tmp_path: Path, task: Path) -> None:
    """The second run is stopped (it saves), goes on, is killed (it goes back to a checkpoint), and goes on."""
    whole = start(tmp_path / "whole", task, loop="async")
    status, out = whole.end()
    assert status == 0, out + whole.logs()
    steps = metrics(whole.root)
    assert [row["staleness/max"] for row in steps.values()] == [0, 1, 1, 1, 1], "the first is sampled before any step"
    assert [row["rollout_id"] for row in rows(whole.root) if "eval/heldout/accuracy" in row] == [-1, 2, 4]
    for number, how in enumerate((signal.SIGTERM, signal.SIGKILL)):
        run = start(tmp_path / "cut", task, loop="async") if not number else Run("--resume", tmp_path / "cut/run", root=run.root)
        run.until(lambda step=number: run.steps() >= 1 + 2 * step)
        pids = run.pids()
        os.kill(run.process.pid, how)
        status, out = run.end()
        assert status in (143, -9), out
        assert all_gone(run.root, pids), processes(run.root)
    again = Run("--resume", run.root, root=run.root)
    status, out = again.end()
    assert status == 0, out + again.logs()
    assert metrics(run.root) == steps
    assert samples(run.root) == samples(whole.root)
    found = account(run.root)
    assert not found.wrong and found.trained == 5 * 8
