"""A sweep as one job array of a real Slurm, and as separate jobs of a scheduler without arrays."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.batch import LocalQueue
from tests.support.cluster import Cluster
from tests.support.runs import SFT, SubmittedRun, metrics, recipe
from tests.support.slurm import MEMORY, hpcrl

STEPS = 40
SWEEP = ("--sweep", "lr=1e-3,2e-3,4e-3")
NAMES = ["lr=0.001", "lr=0.002", "lr=0.004"]


def sft(path: Path, task: Path, **values: Any) -> Path:
    return recipe(path, task, **(SFT | {"num_rollout": STEPS, "save_interval": 5} | values))


@pytest.mark.cluster
def test_an_array_of_three_runs(cluster: Cluster, tmp_path: Path, task: Path) -> None:
    """Pending, at work (one of them requeued, two at once) and at the end, `hpcrl status SWEEP` is right."""
    root, settings = tmp_path / "SWEEP", ("--set", *MEMORY, "trainer.gpus_per_node=0", "trainer.extra.hold=true")
    said = hpcrl(
        cluster, "submit", sft(tmp_path, task), "--run-dir", root, *SWEEP, "--at-once", "2", "--time", "30", *settings
    ).stdout
    array = re.match(r"jobs (\d+)_0 to \1_2, 3 runs", said)[1]
    jobs = {name: f"{array}_{number}" for number, name in enumerate(NAMES)}
    runs = {name: SubmittedRun(root / name) for name in NAMES}

    def look() -> dict[str, dict[str, Any]]:
        found = json.loads(hpcrl(cluster, "status", root, "--json").stdout)
        assert found["job_id"] == array and found["swept"] == ["lr"]
        return {row["name"]: row["status"] for row in found["runs"]}

    waiting = look()
    assert {name: (row["phase"], row["job_id"]) for name, row in waiting.items()} == {
        name: ("pending", jobs[name]) for name in NAMES
    }
    assert all(row["message"].startswith("held") for row in waiting.values()), waiting
    page = hpcrl(cluster, "status", root).stdout
    assert f"3 runs, job array {array}: 3 pending" in page and re.search(rf"0\.002 +pending .*{array}_1", page), page
    cluster.run(["scontrol", "release", array])
    first, last = runs[NAMES[0]], runs[NAMES[2]]
    first.until(lambda: first.training(0))
    working = look()
    assert working[NAMES[0]]["phase"] == "running" and working[NAMES[0]]["step"] > 0, working
    assert "may run at once" in working[NAMES[2]]["message"], working
    cluster.run(["scontrol", "requeue", jobs[NAMES[0]]])
    last.until(lambda: last.training(0))  # in its place
    watched = hpcrl(cluster, "watch", "SWEEP", cwd=tmp_path).stdout
    assert "3 runs" in watched and "3 finished" in watched, watched
    for name, run in runs.items():
        assert list(metrics(run.root)) == list(range(STEPS)), run.logs()
        assert [path.name for path in run.root.glob("logs/job-*")] == [f"job-{jobs[name]}.out"]
    ended = look()
    assert {(row["phase"], row["step"]) for row in ended.values()} == {("finished", STEPS)}
    assert [ended[name]["restarts"] for name in NAMES] == [1, 0, 0]
    hpcrl(
        cluster,
        "submit",
        sft(tmp_path, task),
        "--run-dir",
        root := tmp_path / "HELD",
        *SWEEP,
        "--time",
        "30",
        *settings,
    )
    assert hpcrl(cluster, "stop", root).stdout.count("out of the queue") == 3
    assert {row["status"]["phase"] for row in json.loads(hpcrl(cluster, "status", root, "--json").stdout)["runs"]} == {
        "cancelled"
    }


@pytest.mark.process
def test_separate_jobs_without_arrays(tmp_path: Path, task: Path) -> None:
    """One runs, is stopped with the sweep, and resumes as any run does; the other never starts."""
    queue = LocalQueue(tmp_path / "queue")
    root = tmp_path / "SWEEP"
    said = queue.hpcrl("submit", sft(tmp_path, task, num_rollout=200), "--seeds", "2", "--run-dir", root)
    assert said.stdout.startswith("jobs 1 to 2, 2 runs") and "takes no arrays" in said.stderr
    first = SubmittedRun(root / "seed=1234")
    first.until(lambda: first.steps() > 2)
    page = queue.hpcrl("status", root).stdout
    assert "2 runs: 1 running, 1 pending" in page and "LOSS" in page, page
    queue.hpcrl("stop", root)
    watched = queue.hpcrl("watch", root, check=False)
    assert watched.returncode == 1 and "1 stopped, 1 cancelled" in watched.stdout, watched.stdout
    assert 2 < first.steps() < 200 and not (root / "seed=1235/options.json").exists()
    again = queue.hpcrl("resume", first.root, "--time", "20").stdout
    assert again.startswith("job 3\n")
    first.until(lambda: first.training(1))
    assert "2 runs: 1 running, 1 cancelled" in queue.hpcrl("status", root).stdout
    queue.hpcrl("cancel", root)
    assert not queue.end()
