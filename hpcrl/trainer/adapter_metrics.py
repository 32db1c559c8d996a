"""What several adapters log: each in its own directory, and all of them in the run's, metrics under adapters' names.

    RUN/adapters/a/metrics.jsonl   {"rollout_id": 3, "train/loss": ...}
    RUN/metrics.jsonl              {"rollout_id": 7, "a/train/loss": ..., "perf/train_time": ...}

Invariants: a row of the run's has the number of its step among the steps of all adapters; the run's rows are those of
the adapters, so a start makes them of these, wherever each adapter resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.report.metrics import MetricsLog, read_metrics
from hpcrl.run.rundir import RunDir

FACTS = ("rollout_id", "time")


class AdapterMetrics(MetricsLog):
    """The log of one adapter, which `together` repeats."""

    def __init__(self, rundir: RunDir, name: str, together: TogetherLog) -> None:
        super().__init__(rundir)
        self._name = name
        self._together = together

    def append(self, rollout_id: int, metrics: dict[str, float]) -> None:
        super().append(rollout_id, metrics)
        self._together.append(self._together.number(self._name, rollout_id), named(self._name, metrics))


class TogetherLog(MetricsLog):
    """The log of a run with several adapters."""

    def __init__(self, rundir: RunDir) -> None:
        super().__init__(rundir)
        self._numbers: dict[tuple[str, int], int] = {}

    def number(self, name: str, rollout_id: int) -> int:
        """The number that a rollout of an adapter has among those of all; -1 for what comes before the first."""
        return self._numbers.setdefault((name, rollout_id), len(self._numbers)) if rollout_id >= 0 else -1

    def begin(self, logs: Sequence[tuple[str, MetricsLog]]) -> None:
        """Have the rows of all adapters, once each has forgotten what comes again."""
        found = [(name, row) for name, log in logs for row in read_metrics(log.path)]
        found.sort(key=lambda pair: pair[1].get("time") or 0.0)
        self._numbers.clear()
        rows = []
        for name, row in found:
            facts = {"rollout_id": self.number(name, row["rollout_id"]), "time": row.get("time")}
            rows.append(facts | named(name, {key: value for key, value in row.items() if key not in FACTS}))
        self.rewrite(rows, len(self._numbers))


def named(name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of an adapter as the run has them: `perf/` is of the run."""
    return {key if key.startswith("perf/") else f"{name}/{key}": value for key, value in metrics.items()}
