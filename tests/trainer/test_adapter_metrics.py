"""What several adapters log: in files of their own, and together, also where they resume at different steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.report import metrics
from hpcrl.report.metrics import read_metrics
from hpcrl.run.rundir import RunDir
from hpcrl.trainer.adapter_metrics import AdapterMetrics, TogetherLog
from tests.support.runs import events


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record is a second after the one before."""
    now = iter(range(1_000_000, 1_001_000))
    monkeypatch.setattr(metrics.time, "time", lambda: float(next(now)))


def rows_of(log: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "time"} for row in read_metrics(log.path)]


def logs(root: Path) -> tuple[TogetherLog, dict[str, AdapterMetrics]]:
    together = TogetherLog(RunDir(root, 0))
    own = {name: AdapterMetrics(RunDir(root / name, 0), name, together) for name in ("a", "b")}
    for place in (root, *(root / name for name in own)):
        place.mkdir(exist_ok=True)
    return together, own


def begin(together: TogetherLog, own: dict[str, AdapterMetrics], **at: int) -> None:
    for name, log in own.items():
        log.truncate(at[name])
    together.begin([(name, log, at[name]) for name, log in own.items()])


def test_steps_of_all_are_counted_together(tmp_path: Path) -> None:
    """Each metric has the adapter's name but what the run spent; an evaluation that comes late has its step's number."""
    together, own = logs(tmp_path)
    begin(together, own, a=0, b=0)
    own["a"].append(-1, {"eval/x/accuracy": 0.1})
    for step in range(2):
        own["a"].append(step, {"train/loss": step, "perf/train_time": 2.0})
        own["b"].append(step, {"train/loss": 10 + step, "perf/train_time": 3.0})
    own["a"].append(1, {"eval/x/accuracy": 0.5})
    assert rows_of(own["b"])[1] == {"rollout_id": 1, "train/loss": 11.0, "perf/train_time": 3.0}
    assert rows_of(together) == [
        {"rollout_id": -1, "a/eval/x/accuracy": 0.1},
        {"rollout_id": 0, "a/train/loss": 0.0, "perf/train_time": 2.0},
        {"rollout_id": 1, "b/train/loss": 10.0, "perf/train_time": 3.0},
        {"rollout_id": 2, "a/train/loss": 1.0, "perf/train_time": 2.0},
        {"rollout_id": 3, "b/train/loss": 11.0, "perf/train_time": 3.0},
        {"rollout_id": 2, "a/eval/x/accuracy": 0.5},
    ]


def test_adapters_resume_at_different_steps(tmp_path: Path) -> None:
    """Of an adapter that goes back further than another no step is lost, and none is there twice."""
    together, own = logs(tmp_path)
    begin(together, own, a=0, b=0)
    for step in range(4):
        for number, log in enumerate(own.values()):
            log.append(step, {"train/loss": 10 * number + step})
    together, own = logs(tmp_path)
    begin(together, own, a=4, b=1)
    losses = [{key: value for key, value in row.items() if key != "rollout_id"} for row in rows_of(together)]
    assert losses == [{"a/train/loss": 0}, {"b/train/loss": 10}, *({"a/train/loss": step} for step in (1, 2, 3))]
    assert [row["rollout_id"] for row in rows_of(together)] == [*range(5)]
    own["b"].append(1, {"train/loss": 11.0})
    assert rows_of(together)[-1] == {"rollout_id": 5, "b/train/loss": 11.0}


def test_rows_of_an_adapter_that_lost_its_file_stay(tmp_path: Path) -> None:
    together, own = logs(tmp_path)
    begin(together, own, a=0, b=0)
    for step in range(3):
        for log in own.values():
            log.append(step, {"train/loss": step})
    before = rows_of(together)
    (tmp_path / "a" / "metrics.jsonl").unlink()
    together, own = logs(tmp_path)
    begin(together, own, a=3, b=3)
    assert rows_of(together) == before
    own["b"].append(3, {"train/loss": 3.0})
    assert rows_of(together)[-1]["rollout_id"] == 6


def test_tensorboard_has_the_rows_of_a_resumed_run(tmp_path: Path) -> None:
    """Each step once, and none that an adapter has gone back over."""
    together, own = logs(tmp_path)
    begin(together, own, a=0, b=0)
    for step in range(4):
        for log in own.values():
            log.append(step, {"train/loss": step})
    together.close()
    together = TogetherLog(RunDir(tmp_path, 1))
    own = {name: AdapterMetrics(RunDir(tmp_path / name, 1), name, together) for name in own}
    begin(together, own, a=4, b=1)
    together.close()
    seen = events(tmp_path)
    assert [step for step, _ in seen["a/train/loss"]] == [1, 3, 4, 5]
    assert [step for step, _ in seen["b/train/loss"]] == [2]
