"""What a tracker is sent of a stage of a run: options, the metrics since the last time, samples, the report.

    RUN/sync.json     tracker -> stage -> time of the last record that was sent
    RUN/sync.lock     locked by the process that sends (`sending.py`)

Invariants: a record is counted as sent after the tracker has taken it, so that one that fails is sent again; of the run
these two alone are written here, whatever files a tracker keeps; no value of an environment variable, of an option that
is named like a secret or of a password in an address is sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from hpcrl.errors import DeadlineError, HpcrlError, UsageError
from hpcrl.report.metrics import number, read_metrics
from hpcrl.report.progress import say
from hpcrl.report.run_files import Run, StageFiles, load_json
from hpcrl.report.sample_records import read_looks, steps_of
from hpcrl.run.rundir import write_atomic
from hpcrl.run.started_runs import read_recipe_file
from hpcrl.utils.locks import try_lock
from hpcrl.utils.plain_text import strip_control
from hpcrl.utils.plugins import PluginFolder
from hpcrl.utils.untrusted_files import open_append
from hpcrl.utils.waiting import Deadline, poll

TRACKERS = PluginFolder(Path(__file__).parent, "opened")
SENT = "sync.json"
SAMPLES = 32  #: of the last step, in the table of samples
HIDDEN = ("train_env_vars",)  #: options whose values are environment variables
SECRET = re.compile(r"(^|_)(token|secret|password|api_key)s?$", re.IGNORECASE)
PASSWORD = re.compile(r"://[^/@\s]+@")  #: and user, in an address
COLUMNS = ("step", "prompt", "response", "label", "reward")


@dataclass(frozen=True)
class TrackedStage:
    """What is sent of one stage.

    Attributes:
        project: what the tracker groups runs by: --wandb-project, or the recipe's name.
        name: the run's, with its stage.
        identity: the same for the same stage each time it is sent.
        options: the resolved options, values of JSON.
        rows: (steps done, metric -> value), ascending.
        samples: rows of COLUMNS.
        report: a page about the run; None if there is none.
    """

    root: Path
    project: str
    name: str
    identity: str
    options: Mapping[str, Any]
    rows: list[tuple[int, dict[str, float]]]
    samples: list[list[Any]]
    report: Path | None


def check_tracker(tracker: str) -> None:
    """Raise UsageError for a tracker that is unknown or not installed."""
    if tracker not in TRACKERS:
        raise UsageError(f"--to {tracker} is not a tracker", TRACKERS.hint(tracker))
    needed = TRACKERS.literals(tracker, {"NEEDS": (tracker,)})["NEEDS"]
    # a directory of that name, such as what it has written, is no package
    if lacking := [name for name in needed if getattr(importlib.util.find_spec(name), "origin", None) is None]:
        raise UsageError(f"{', '.join(lacking)} is not installed here", f"pip install 'hpcrl[{tracker}]'")


class Sender:
    """Sends runs to one tracker; the stage that was sent last stays open there until `close`.

    Raises:
        UsageError: as of `check_tracker`.
    """

    def __init__(self, tracker: str) -> None:
        check_tracker(tracker)
        self._tracker = tracker
        self._stack = contextlib.ExitStack()
        self._open: tuple[str, Callable[[TrackedStage], str]] | None = None

    def send_new(self, run: Run, report: Path | None, last: bool = True) -> Iterator[tuple[str, int, str]]:
        """Send what is new of every stage; yields (name, records, where it can be looked at) of each.

        Args:
            last: send samples and the report too, and close a stage there before its records count as sent.

        Raises:
            HpcrlError: if the tracker refuses what it is sent, or another process is sending the run.
        """
        with sending(run.root):
            sent = load_json(run.root / SENT, dict[str, dict[str, float]], run.notes) or {}
            done = sent.setdefault(self._tracker, {})
            for stage in run.stages:
                rows = list(read_metrics(stage.root / "metrics.jsonl"))
                newest, also = max(map(_time, rows), default=0.0), f"{stage.name} {'report' if report else 'samples'}"
                rows = [row for row in rows if _time(row) > done.get(stage.name, 0.0)]
                if not rows and not (last and newest > done.get(also, 0.0)):
                    continue
                found = _tracked(run, stage, rows, report, last)
                try:
                    place = self._send(found)
                    if last:
                        self.close()
                except Exception as error:
                    what = f"{type(error).__name__}: {error}"
                    raise HpcrlError(f"{self._tracker} has not taken {found.name}: {what}") from error
                done[stage.name] = newest
                if last:
                    done[also] = newest
                write_atomic(run.root / SENT, msgspec.json.encode(sent))
                yield found.name, len(rows), place

    def _send(self, stage: TrackedStage) -> str:
        if self._open is None or self._open[0] != stage.identity:
            self.close()
            opened = importlib.import_module(f"hpcrl.report.trackers.{self._tracker}").opened
            self._open = stage.identity, self._stack.enter_context(opened(stage))
        return self._open[1](stage)

    def close(self) -> None:
        """Close the stage there."""
        self._open = None
        self._stack.close()


def without_secrets(value: Any, name: str = "") -> Any:
    """A value of the options, as far as others may see it."""
    if isinstance(value, dict):
        hidden = name in HIDDEN
        return {key: "..." if hidden else without_secrets(item, key) for key, item in value.items()}
    if SECRET.search(name) and isinstance(value, str):
        return "..."
    if isinstance(value, list):
        return [without_secrets(item, name) for item in value]
    return PASSWORD.sub("://...@", value) if isinstance(value, str) else value


def _time(row: Mapping[str, Any]) -> float:
    return row["time"] if number(row.get("time")) else 0.0


def _tracked(
    run: Run, stage: StageFiles, rows: list[dict[str, Any]], report: Path | None, samples: bool = True
) -> TrackedStage:
    options = without_secrets(load_json(stage.root / "options.json", dict[str, Any], run.notes) or {})
    name = f"{run.root.name}/{stage.name}" if stage.name else run.root.name
    logged = [(row["rollout_id"] + 1, row.items()) for row in rows]
    values = [
        (step, {k: float(v) for k, v in row if k not in ("rollout_id", "time") and number(v)}) for step, row in logged
    ]
    identity = hashlib.sha256(f"{_identity(run.root)}/{stage.name}".encode()).hexdigest()[:16]
    project = str(options.get("wandb_project") or options.get("name") or "hpcrl")
    return TrackedStage(stage.root, project, name, identity, options, sorted(values, key=lambda pair: pair[0]),
                        _samples(stage) if samples else [], report)  # fmt: skip


def _identity(root: Path) -> str:
    """The run's own, wherever its directory is."""
    try:
        return read_recipe_file(root).identity
    except HpcrlError:
        return str(root)


def _samples(stage: StageFiles) -> list[list[Any]]:
    """The first samples of the last step."""
    steps = steps_of(stage.root)[-1:]
    looks = ((step, look.record) for step in steps for look in islice(read_looks(stage.root, step), SAMPLES))
    return [[step, str(each.prompt), each.response, str(each.label), each.reward] for step, each in looks]


# ---- sending
#
# RUN/sync.lock: one process at a time sends a run to trackers.
#
# Invariants: what was sent is read and noted by the process that holds the lock, so that no record is sent twice
# where locks count for all hosts; the kernel lets go of it however the process ends, and a file that is left says
# nothing.


LOCK = "sync.lock"
WAIT = 30.0  #: seconds for which another process may hold it
LOOK = 0.2  #: seconds between looks
LONGEST = 200  #: characters of the name of the one that sends


@contextlib.contextmanager
def sending(root: Path, seconds: float = WAIT) -> Iterator[None]:
    """Be the one that sends the run in `root`, within this context.

    Raises:
        DeadlineError: names the process that has been sending for longer than `seconds`.
    """
    with open_append(root / LOCK) as file:
        meanwhile = "send it from nowhere else meanwhile"
        take = partial(try_lock, file, lambda why: say(f"note: {root} cannot be locked ({why}): {meanwhile}"))
        if not take():
            say(f"{_holder(file)} is sending {root}: waiting until it is done, {seconds:.0f} s at most")
            if not poll(take, Deadline(seconds), LOOK):
                raise DeadlineError(
                    f"{_holder(file)} has been sending {root} for {seconds:.0f} s: nothing was sent",
                    "call it again when that is done",
                )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        file.flush()
        yield


def _holder(file: BinaryIO) -> str:
    file.seek(0)
    return strip_control(file.read(LONGEST).decode(errors="replace")).strip() or "another process"
