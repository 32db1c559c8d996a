"""Metrics of a run: one JSON line a record in metrics.jsonl, and the same numbers as TensorBoard events.

Invariant: only trainer rank 0 writes; a step stands in metrics.jsonl once, whatever was killed and resumed, and the file
holds whole lines only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcrl.errors import HpcrlError
from hpcrl.rundir import RunDir, write_atomic


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that was torn by a crash is left out."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    for line in text.split("\n")[:-1]:  # what follows the last newline is torn, or nothing
        yield json.loads(line)


class MetricsLog:
    """The writer of a run's metrics."""

    def __init__(self, rundir: RunDir) -> None:
        self.path, self.rundir = rundir.metrics_file, rundir
        self.events: Any = None

    def truncate(self, rollout_id: int) -> None:
        """Forget what is logged for `rollout_id` and later: those steps come again.

        At 0, what was logged before the first step (-1) goes too.
        """
        first = rollout_id if rollout_id > 0 else -1
        kept = [row for row in read(self.path) if row["rollout_id"] < first]
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept).encode())

    def evaluated(self, rollout_id: int) -> bool:
        """Whether an evaluation after `rollout_id` is logged."""
        return any(row["rollout_id"] == rollout_id and any(k.startswith("eval/") for k in row) for row in read(self.path))

    def append(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Add one record.  HpcrlError when it cannot be written."""
        row = {"rollout_id": rollout_id, "time": round(time.time(), 3), **{k: float(v) for k, v in metrics.items()}}
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self._to_tensorboard(rollout_id, metrics)
        except OSError as error:
            raise HpcrlError(f"cannot write {self.path}: {error.strerror}", "free space, then continue with --resume") from error

    def _to_tensorboard(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Events, if the tensorboard package is there; its x-axis counts rollouts that are done."""
        if self.events is None:
            self.events = _open_events(self.rundir.tensorboard, rollout_id)
        if self.events:
            for name, value in metrics.items():
                self.events.add_scalar(name, value, rollout_id + 1)
            self.events.flush()

    def close(self) -> None:
        """Flush and close the events."""
        if self.events:
            self.events.close()


def _open_events(directory: Path, rollout_id: int) -> Any:
    """A SummaryWriter that hides the events of an earlier attempt from this step on; False without tensorboard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return False
    return SummaryWriter(str(directory), purge_step=rollout_id + 1)
