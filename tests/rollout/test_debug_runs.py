"""One side of a run alone, in real processes: engines without a trainer, and a rollout process without engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrl.report.metrics import read_metrics
from hpcrl.run.summary import read_summary
from tests.rollout.test_main import EACH, GROUPS, REPO, Attempt, model

pytestmark = pytest.mark.process
__all__ = ["model"]


def drive(attempt: Attempt) -> subprocess.Popen[bytes]:
    """The process in place of the trainer."""
    command = [
        sys.executable,
        "-m",
        "hpcrl.trainer.rollout_driver",
        str(attempt.rundir.root),
        "--attempt",
        str(attempt.rundir.attempt),
    ]
    with (attempt.rundir.root / "driver.log").open("ab") as out:
        return subprocess.Popen(command, cwd=REPO, env=os.environ | {"PYTHONPATH": str(REPO)}, stdout=out, stderr=out)


def test_sampling_without_a_trainer(tmp_path: Path, model: Path) -> None:
    """Every rollout under version 0; a stop in the middle, then on with the next prompts; and training from what was
    saved."""
    saved = str(tmp_path / "data/{rollout_id}")
    more: dict[str, Any] = {
        "debug_rollout_only": True,
        "save_debug_rollout_data": saved,
        "num_rollout": 4,
        "eval_interval": 2,
    }
    root = tmp_path / "run"
    with Attempt(root, model, None, None, **more) as attempt:
        driver = drive(attempt)
        deadline = time.monotonic() + 60
        while not (root / "samples/00000000.jsonl").exists():
            assert driver.poll() is None and time.monotonic() < deadline, (root / "driver.log").read_text()
            time.sleep(0.02)
        attempt.rundir.request_stop()
        assert driver.wait(60) == 0 and attempt.end() == 0, (root / "driver.log").read_text() + attempt.log.read_text()
        assert [engine.version for engine in attempt.engines] == ["0", "0"]
    done = read_summary(root)
    assert done is not None and done.status in ("stopped", "finished") and done.policy_version == 0
    assert json.loads((root / "position.json").read_text())["rollout_id"] == done.rollout_id >= 1
    assert {"rollout/reward", "perf/step_time"} <= set(
        next(row for row in read_metrics(root / "metrics.jsonl") if row["rollout_id"] == 0)
    )
    with Attempt(root, model, None, None, **more) as attempt:
        driver = drive(attempt)
        assert driver.wait(60) == 0 and attempt.end() == 0, (root / "driver.log").read_text() + attempt.log.read_text()
    steps = [row["rollout_id"] for row in read_metrics(root / "metrics.jsonl") if "rollout/reward" in row]
    evaluations = [row["rollout_id"] for row in read_metrics(root / "metrics.jsonl") if "eval/held/accuracy" in row]
    assert steps == [0, 1, 2, 3] and set(evaluations) >= {-1, 3}
    groups = [
        json.loads(line)["group"]
        for step in range(4)
        for line in (root / f"samples/{step:08d}.jsonl").read_text().splitlines()
    ]
    assert groups == [group for group in range(4 * GROUPS) for _ in range(EACH)], (
        "no prompt is left out, none comes twice"
    )
    replay(tmp_path, model, saved, root)


def replay(tmp_path: Path, model: Path, saved: str, root: Path) -> None:
    """A run without engines hands the trainer what was sampled."""
    more = {"load_debug_rollout_data": saved, "num_rollout": 4, "prompt_data": None, "custom_rm_path": None}
    with Attempt(tmp_path / "replay", model, **more) as attempt:
        assert not attempt.plan.engines and attempt.begin() == 4
        for rollout_id in range(4):
            shares, state = attempt.step(rollout_id)
            assert state["rollout_id"] == rollout_id and all(share.version == rollout_id for share in shares)
            assert all((share.batch.versions == rollout_id).all() for share in shares), "on policy then, on policy now"
        attempt.call("finish", rollout_id=4)
        assert attempt.end() == 0, attempt.log.read_text()
        for step in range(4):
            rows, before = (
                [json.loads(line) for line in (path / f"samples/{step:08d}.jsonl").read_text().splitlines()]
                for path in (attempt.rundir.root, root)
            )
            assert [row | {"versions": [0]} for row in rows] == before


def test_a_missing_file_ends_the_run_at_its_start(tmp_path: Path, model: Path) -> None:
    with Attempt(tmp_path / "run", model, load_debug_rollout_data=str(tmp_path / "none-{rollout_id}")) as attempt:
        assert attempt.end() == 1
        assert "--load-debug-rollout-data" in attempt.error() and "none-0: No such file" in attempt.error()
