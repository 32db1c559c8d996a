"""A run whose only engine was there before it, ends and comes back in the middle, and is there after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hpcrl.engine.membership.http import Address, HttpError, request_json
from hpcrl.run.engine_files import read_views
from hpcrl.run.rundir import RunDir
from tests.support.runs import POLICY, REPO, Run, alive, all_gone, metrics, recipe, unused_port

pytestmark = pytest.mark.vllm


def serve(recipe_file: Path, address: str, keys: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "hpcrl",
        "engines",
        "serve",
        str(recipe_file),
        "--listen",
        address,
        "--keys",
        str(keys),
    ]
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
        )


def end(engine: subprocess.Popen[bytes]) -> None:
    """As its user does; nothing of it is left."""
    there = psutil.Process(engine.pid).children(recursive=True)
    engine.send_signal(signal.SIGTERM)
    assert engine.wait(30) == 0
    deadline = time.monotonic() + 10  # a child that was killed is there until the kernel is done with it
    while left := [p for p in there if alive(p.pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_one_external_engine_two_runs(tmp_path: Path, task: Path) -> None:
    """An engine that no run has started serves one run after another."""
    port = unused_port()
    address = f"127.0.0.1:{port}"
    keys = tmp_path / "keys"
    log = tmp_path / "engine.log"
    root = tmp_path / "run"
    values = {"num_rollout": 100000, "save_interval": None, "rollout_num_gpus": None, "run_dir": str(root)}
    values |= {"rollout_external_engine_addrs": [address], "rollout_external_engine_keys": str(keys), "attempts": 3}
    file = recipe(tmp_path, task, **(POLICY | values))
    engine = serve(file, address, keys, log)
    try:
        while not (keys / "http.key").exists():
            assert engine.poll() is None, log.read_text()
            time.sleep(0.1)
        run = Run(file, root=root)
        run.until(lambda: run.steps() >= 2, 240)
        with pytest.raises(HttpError, match="401"):
            request_json(Address("127.0.0.1", port, "no key"), "GET", "/health", 10)
        end(engine)
        engine = serve(file, address, keys, log)  # it comes back with the weights that it began with
        there = run.steps()
        run.until(lambda: run.steps() >= there + 3, 240)
        views = lambda: read_views(RunDir.latest(root).here)  # noqa: E731
        run.until(lambda: [(v.host, v.state) for v in views().engines] == [(address, "serving")], 60)
        os.kill(run.process.pid, signal.SIGTERM)
        status, out = run.end()
        assert status == 143, out + run.logs()
        assert all_gone(root, []) and engine.poll() is None
        steps = metrics(root)
        assert list(steps) == list(range(len(steps)))
        assert all(row["train/train_rollout_logprob_abs_diff"] <= 1e-5 for row in steps.values()), (
            "it had the current weights"
        )
        more = ("--num-rollout", "2", "--weight-transfer", "disk", "--run-dir", tmp_path / "second")
        again = Run(file, *more, root=tmp_path / "second")
        status, out = again.end()
        assert status == 0, out + again.logs()
        steps = metrics(again.root)
        assert len(steps) == 2
        assert all(row["train/train_rollout_logprob_abs_diff"] <= 1e-5 for row in steps.values()), (
            "and those of the next run"
        )
    finally:
        end(engine)
    assert sorted(path.name for path in keys.iterdir()) == ["http.key"]
