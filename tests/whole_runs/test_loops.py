"""Whole runs of the asynchronous loops: one rollout ahead repeats and resumes bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.ledger_account import account
from tests.support.runs import POLICY, Run, metrics, recipe, rows, samples

pytestmark = pytest.mark.vllm


def start(path: Path, task: Path, **values: object) -> Run:
    path.mkdir(exist_ok=True)
    root = path / "run"
    held = {"eval_prompt_data": ["heldout", str(task / "heldout.jsonl")], "eval_interval": 3, "eval_label_key": "label"}
    return Run(recipe(path, task, **(POLICY | held | {"run_dir": str(root)} | values)), root=root)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, task: Path) -> Path:
    """A run of the async loop that nobody disturbed."""
    run = start(tmp_path_factory.mktemp("whole"), task, loop="async")
    status, out = run.end()
    assert status == 0, out + run.logs()
    return run.root


def test_async_loop_is_one_step_ahead(whole: Path) -> None:
    steps = metrics(whole)
    assert [row["staleness/max"] for row in steps.values()] == [0, 1, 1, 1, 1], "the first is sampled before any step"
    assert [row["rollout_id"] for row in rows(whole) if "eval/heldout/accuracy" in row] == [-1, 2, 4]
    found = account(whole)
    assert not found.wrong and found.trained == 5 * 8


def test_async_loop_repeats_and_resumes(tmp_path: Path, task: Path, whole: Path) -> None:
    """The run is stopped (it saves), goes on, is killed (it goes back to a checkpoint), and goes on."""
    run = start(tmp_path / "cut", task, loop="async")
    run.end_early(1, signal.SIGTERM, ahead=1)
    run = Run("--resume", run.root, root=run.root)
    run.end_early(3, signal.SIGKILL, ahead=1)
    again = Run("--resume", run.root, root=run.root)
    status, out = again.end()
    assert status == 0, out + again.logs()
    assert metrics(run.root) == metrics(whole)
    assert samples(run.root) == samples(whole)
    found = account(run.root)
    assert not found.wrong and found.trained == 5 * 8


def test_fully_async_keeps_the_bound(tmp_path: Path, task: Path) -> None:
    """Stopped once, it goes on; responses are so long that new weights reach them on the way."""
    more = {
        "rollout_max_response_len": 180,
        "rollout_max_context_len": 256,
        "max_tokens_per_gpu": 2048,
        "num_rollout": 10,
    }
    run = start(tmp_path, task, loop="fully-async", deterministic_mode=False, use_tis=True, max_staleness=2, **more)
    run.end_early(2, signal.SIGTERM, ahead=1)
    again = Run("--resume", run.root, root=run.root)
    status, out = again.end()
    assert status == 0, out + again.logs()
    steps = metrics(run.root)
    assert list(steps) == list(range(10)) and all(row["staleness/max"] <= 2 for row in steps.values())
    assert any(row["staleness/mean"] > 0 for row in steps.values())
    shares = [
        sum(value for name, value in row.items() if name.startswith("staleness/share/")) for row in steps.values()
    ]
    assert shares == pytest.approx([1] * 10)
    evaluated = {row["rollout_id"]: row for row in rows(run.root) if "eval/heldout/accuracy" in row}
    assert {-1, 9} <= evaluated.keys() and "eval/heldout/policy_version" not in evaluated[9], (
        "the last one is waited for"
    )
    beside = [row for rollout_id, row in evaluated.items() if rollout_id < 9]
    assert all(row["eval/heldout/policy_version"] == row["rollout_id"] + 1 for row in beside)
    assert all(0 < row["eval/heldout/policy_version_ratio"] <= 1 for row in beside)
    lines = [
        json.loads(line) for name, data in samples(run.root).items() if name[0].isdigit() for line in data.splitlines()
    ]
    assert any(len(set(row["versions"])) > 1 for row in lines), "a response has tokens of several policies"
    name = "train/train_rollout_logprob_abs_diff"
    assert max(row[name] for row in steps.values() if name in row) <= 1e-5, (
        "of tokens of the present policy, behind others' too"
    )
    found = account(run.root)
    assert not found.wrong and found.trained == 10 * 8
