"""What several adapters log: each in its own directory, and all of them in the run's, metrics under adapters' names.

    RUN/adapters/a/metrics.jsonl   {"rollout_id": 3, "train/loss": ...}
    RUN/metrics.jsonl              {"rollout_id": 7, "a/train/loss": ..., "perf/train_time": ...}

Invariants: a row of the run's has the number of its step among the steps of all adapters; the run's rows are those of
the adapters, so a start makes them of these, wherever each adapter resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.report.metrics import MetricsLog, number, read_metrics
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
        self._before = 0  # steps of which it is not known whose they are

    def number(self, name: str, rollout_id: int) -> int:
        """The number that a rollout of an adapter has among those of all; -1 for what comes before the first."""
        new = self._before + len(self._numbers)
        return self._numbers.setdefault((name, rollout_id), new) if rollout_id >= 0 else -1

    def begin(self, logs: Sequence[tuple[str, MetricsLog, int]]) -> None:
        """Have the rows of all adapters, in the order in which they were logged; those that this log has itself, where
        the file of an adapter lacks steps.

        Args:
            logs: (name, log, the rollout that comes next) of each, once its log has forgotten what comes again.
        """
        rows = {name: list(read_metrics(log.path)) for name, log, _ in logs}
        done = sum(next_id for _, _, next_id in logs)
        if any(set(range(next_id)) - {row["rollout_id"] for row in rows[name]} for name, _, next_id in logs):
            self._before = done
            self.truncate(done)
            return
        found = [(name, row) for name in rows for row in rows[name]]
        found.sort(key=lambda pair: pair[1]["time"] if number(pair[1].get("time")) else 0.0)
        made = []
        for name, row in found:
            facts = {"rollout_id": self.number(name, row["rollout_id"]), "time": row.get("time")}
            made.append(facts | named(name, {key: value for key, value in row.items() if key not in FACTS}))
        self.rewrite(made, 0)
        for row in made:  # TensorBoard's have other numbers where an adapter went back further than another
            values = {key: value for key, value in row.items() if key not in FACTS and number(value)}
            self.add_event(row["rollout_id"] + 1, values)


def named(name: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of an adapter as the run has them: `perf/` is of the run."""
    return {key if key.startswith("perf/") else f"{name}/{key}": value for key, value in metrics.items()}
