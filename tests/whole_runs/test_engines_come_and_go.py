"""Engines that join a run on this machine while it trains, and leave it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from hpcrl.cli import main
from hpcrl.report.timeline.reading import read_stage
from hpcrl.report.timeline.spans import GENERATE, JOINS
from hpcrl.run.engine_files import read_views
from tests.support.runs import NO_AGENT, POLICY, Run, all_gone, metrics, recipe

pytestmark = pytest.mark.vllm


def states(run: Run) -> list[str]:
    views = read_views(run.root / "attempts/0")
    return [view.state for view in views.engines] if views else []


def test_an_engine_joins_and_the_first_one_leaves(
    tmp_path: Path, task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    values = {"num_rollout": 100000, "save_interval": None, "run_dir": str(root)}
    run = Run(recipe(tmp_path, task, **(POLICY | NO_AGENT | values)), root=root)
    run.until(lambda: run.steps() >= 1)
    assert main(["engines", "add", str(root)]) == 0, capsys.readouterr().err
    run.until(lambda: states(run) == ["serving", "serving"])
    assert main(["engines", "remove", str(root), "0"]) == 0
    run.until(lambda: states(run) == ["gone", "serving"])
    there = run.steps()
    run.until(lambda: run.steps() >= there + 3)
    pids = run.pids()
    os.kill(run.process.pid, signal.SIGTERM)
    status, out = run.end()
    assert status == 143, out + run.logs()
    assert all_gone(root, pids, 30)
    steps = metrics(root)
    assert list(steps) == list(range(len(steps)))
    assert all(row["train/train_rollout_logprob_abs_diff"] <= 1e-5 for row in steps.values()), (
        "all had the current weights"
    )
    tracks = {track.name: track for track in read_stage(root)}
    busy = {span.more["engine"] for span in tracks["rollout-0"].named(GENERATE)}
    assert busy == {0, 1} and list(tracks["joined of 127.0.0.1"].named(JOINS)[0].more["engines"]) == ["1"]
    capsys.readouterr()
    assert main(["bill", str(root), "--json"]) == 0
    bill = json.loads(capsys.readouterr().out)
    assert sum(bill["node_hours"].values()) == pytest.approx(bill["total"]) and len(bill["allocations"]) == 1, (
        "on its host"
    )
