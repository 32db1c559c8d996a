"""Metrics of a run: one JSON line a record in metrics.jsonl, the same numbers as TensorBoard events, and how long a
stage still takes, from the steps that it has logged.

Invariants: only trainer rank 0 writes; a step is in metrics.jsonl once, whatever was killed and resumed, and a reader
sees whole lines only; what cannot be written for TensorBoard ends no run. An estimate uses the last WINDOW steps only,
and medians, so that neither a slow start, a restart nor one long checkpoint moves it much.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from hpcrl.errors import HpcrlError
from hpcrl.report.file_tail import FARTHEST, last_lines
from hpcrl.run.rundir import RunDir, write_atomic
from hpcrl.run.storage_errors import describe, remedy, retry_while_passing
from hpcrl.utils.untrusted_files import Damaged, open_append, open_regular, parse_json

HELD_OUT_MEAN = re.compile(r"eval/([^/]+)/accuracy")  #: the metric with a held-out set's mean reward


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl; what a crash has torn or damaged is left out."""
    try:
        with open_regular(path) as file:
            data = file.read()
    except FileNotFoundError:
        return
    for line in data.split(b"\n")[:-1]:  # what follows the last newline is torn, or nothing
        if (row := parse_record(line)) is not None:
            yield row


def last_records(path: Path, count: int, within: int = FARTHEST) -> list[dict[str, Any]]:
    """The records in the last `count` lines that are whole within the last `within` bytes of a metrics.jsonl."""
    return [row for line in last_lines(path, count, within) if (row := parse_record(line)) is not None]


def parse_record(line: bytes) -> dict[str, Any] | None:
    """One record, or None if the line is none."""
    try:
        row = parse_json(line)
    except Damaged:  # a power cut may leave zeros where a line should be
        return None
    known = isinstance(row, dict) and isinstance(row.get("rollout_id"), int) and abs(row["rollout_id"]) < 1 << 53
    return row if known else None


def _note(text: str) -> None:
    """For the log of the writer."""
    with contextlib.suppress(OSError):
        print(f"note: {text}", file=sys.stderr, flush=True)


class MetricsLog:
    """The writer of a run's metrics."""

    def __init__(self, rundir: RunDir) -> None:
        self.path = rundir.metrics_file
        self.rundir = rundir
        self.events: EventFile | None = None
        self.with_events = True  # until TensorBoard's package is found to be missing, or its file cannot be written
        self._purge: int | None = None  # the first step of TensorBoard's that comes again

    def truncate(self, rollout_id: int) -> None:
        """Forget what is logged for `rollout_id` and later, and a torn last line: those steps come again.

        At 0, what was logged before the first step (-1) goes too.  If earlier steps are missing, because the file was
        removed or damaged, the log says so.
        """
        first = rollout_id if rollout_id > 0 else -1
        kept = [row for row in read_metrics(self.path) if row["rollout_id"] < first]
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self._purge = first + 1
        if lacking := set(range(rollout_id)) - {row["rollout_id"] for row in kept}:
            _note(
                f"{self.path} lacks {len(lacking)} of the {rollout_id} steps before this start, "
                f"{min(lacking)} the first: samples/, tensorboard/ and checkpoints/ have their own record"
            )

    def evaluated(self, rollout_id: int) -> bool:
        """Whether an evaluation after `rollout_id`, or a later one, is logged."""
        return any(row["rollout_id"] >= rollout_id and evaluated(row) for row in read_metrics(self.path))

    def append(self, rollout_id: int, metrics: dict[str, float]) -> None:
        """Add one record; a number that is not finite is written as null.

        Raises:
            HpcrlError: when it cannot be written.
        """
        values = {name: float(value) for name, value in metrics.items()}
        told = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"rollout_id": rollout_id, "time": round(time.time(), 3)} | told) + "\n"
        try:
            retry_while_passing(lambda: self._add(line.encode()))
        except OSError as error:
            raise HpcrlError(
                f"cannot write {self.path}: {describe(error, self.path)}",
                f"{remedy(error)}, then continue with --resume",
            ) from error
        self._add_event(rollout_id + 1, values)

    def _add_event(self, step: int, values: dict[str, float]) -> None:
        """A record for TensorBoard. What fails there is said once, and costs the rest of this attempt's events."""
        if not self.with_events:
            return
        try:
            if self.events is None:
                self.events = EventFile(self.rundir.tensorboard, self.rundir.attempt, self._purge)
            self.events.add(step, values)
        except ImportError:
            self.with_events = False
        except Exception as error:  # noqa: BLE001  (whatever a package has against it, the run is worth more)
            why = describe(error, self.rundir.tensorboard) if isinstance(error, OSError) else repr(error)
            _note(
                f"cannot write {self.rundir.tensorboard}: {why}; it has no more steps of this attempt, "
                f"{self.path.name} has them all"
            )
            self.with_events = False
            with contextlib.suppress(Exception):
                self.close()

    def _add(self, line: bytes) -> None:
        """A line at the end, or nothing.  OSError."""
        with open_append(self.path) as file:
            number = file.fileno()
            size = os.fstat(number).st_size
            try:
                while line:
                    line = line[os.write(number, line) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(number, size)
                raise

    def close(self) -> None:
        """Close the events."""
        if self.events is not None:
            self.events.close()


# ---- TensorBoard


class EventFile:
    """One event file, written at once and by this thread, so that a full disk is seen where it happens.

    The package's own protobuf classes and record format are used; torch.utils.tensorboard would add a writer thread
    that reports a failed write one step late.

    Args:
        purge: events of earlier attempts from this step on are hidden; the x-axis counts rollouts that are done.
    """

    def __init__(self, directory: Path, attempt: int, purge: int | None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(exist_ok=True, mode=0o700)
        name = f"events.out.tfevents.{int(time.time()):010d}.attempt-{attempt}"
        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._records = RecordWriter((directory / name).open("wb"))
        self._write(file_version="brain.Event:2")
        if purge is not None:
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=purge, session_log=log)

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Write scalars of one step.

        Raises:
            OSError: when the disk is full.
        """
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=self._summary(value=values))

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()


WINDOW = 20  #: steps that count
LARGEST = 1e18  #: no time, size or mean of a run is so large


def step_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of steps among the records of metrics.jsonl; a run that only samples has no loss."""
    return [row for row in rows if "perf/step_time" in row or "train/loss" in row]


def evaluated(row: dict[str, Any]) -> bool:
    """Whether the record is of an evaluation."""
    return any(name.startswith("eval/") for name in row)


def step_time(rows: list[dict[str, Any]]) -> float | None:
    """Median seconds of the last steps, or None if none is known.

    Args:
        rows: the last records of metrics.jsonl, in order.
    """
    times = [row["perf/step_time"] for row in step_rows(rows) if number(row.get("perf/step_time"))]
    return median(times[-WINDOW:]) if times else None


def pauses(rows: list[dict[str, Any]], kind: Callable[[int], object]) -> dict[object, float]:
    """Median seconds between the end of one step and the start of the next, for each kind of pause.

    kind(done): what the run does after `done` steps, such as (saves, evaluates).  The clock of the records tells.
    """
    found: dict[object, list[float]] = {}
    steps = [row for row in step_rows(rows) if number(row.get("perf/step_time")) and number(row.get("time"))]
    for before, after in pairwise(steps):
        if after["rollout_id"] == before["rollout_id"] + 1:
            pause = after["time"] - before["time"] - after["perf/step_time"]
            found.setdefault(kind(before["rollout_id"] + 1), []).append(max(0.0, pause))
    for row in rows:  # an evaluation's record tells as well, and the last one has no step after it
        # one that the trainer has not waited for names its policy version
        waited = evaluated(row) and not any(re.fullmatch(r"eval/.*/policy_version", name) for name in row)
        own = [step for step in steps if waited and step["rollout_id"] == row["rollout_id"]]
        if own and number(row.get("time")):
            found.setdefault(kind(row["rollout_id"] + 1), []).append(max(0.0, row["time"] - own[0]["time"]))
    return {what: median(times[-WINDOW:]) for what, times in found.items()}


def seconds_left(
    rows: list[dict[str, Any]], done: int, total: int, saves: int | None, evaluates: int | None, now: float
) -> float | None:
    """Seconds until step `total` is done, saved and evaluated, or None if no step is known.

    Args:
        saves, evaluates: every how many steps; None for never but at the end, and never.
        now: unix time; what has passed since the last record is taken off the first step.
    """
    each = step_time(rows)
    if each is None:
        return None
    if done >= total:
        return 0.0

    def kind(after: int) -> tuple[bool, bool]:
        end = after == total
        return end or due(after, saves), evaluates is not None and (end or due(after, evaluates))

    known = pauses(rows, kind)
    usual = known.get((False, False), 0.0)
    left = sum(each + known.get(kind(step), usual) for step in range(done + 1, total + 1))
    last = step_rows(rows)[-1].get("time")
    passed = min(each, max(0.0, now - last)) if number(last) else 0.0
    return left - passed


def due(step: int, interval: int | None) -> bool:
    return bool(interval) and step % interval == 0


def held_out_means(row: dict[str, Any]) -> dict[str, float]:
    """Held-out set -> its mean reward in this record."""
    means = {match[1]: row[name] for name in row if (match := HELD_OUT_MEAN.fullmatch(name))}
    return {name: value for name, value in means.items() if number(value)}


def measure(rows: Iterable[dict[str, Any]]) -> str:
    """What the means of held-out sets in these records are: "accuracy" if every reward was 0 or 1, else "reward"."""
    for row in rows:
        for name, value in held_out_means(row).items():
            if not row.get(f"eval/{name}/right_or_wrong", 0 <= value <= 1):  # all that is known of an own function's
                return "reward"
    return "accuracy"


def tokens_per_sec(row: dict[str, Any]) -> float | None:
    """Tokens sampled a second in a step; in fine-tuning, where none are, those that were learned."""
    if number(sampled := row.get("perf/tokens_per_sec")):
        return sampled
    learned, seconds = row.get("perf/train_tokens", 0.0), row.get("perf/step_time")
    return learned / seconds if number(learned) and number(seconds) and seconds else None


def number(value: object) -> bool:
    """Whether it is a number that counts: what was not finite is logged as null, and nothing here reaches LARGEST."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST  # NaN: False
