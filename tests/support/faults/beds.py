"""What a bed of faults is: a place where one run after another is started, struck and gone on with.

Invariant: a bed knows everything that a run of it has started and left, wherever that is, and nothing of anybody
else's.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.runs import metrics


class Process(NamedTuple):
    """A process of a run.  pid: as this process may signal it; argv: its command line."""

    host: str
    pid: int
    argv: list[str]


class Missed(Exception):
    """There was nobody to strike: the run was just ending, or not that far."""


class Bed(ABC):
    """One run at a time, in `root`; `shape` are the recipe's values by which it differs from others."""

    shape: Mapping[str, Any]
    root: Path
    folder: Path  #: of the run's own
    look = 0.05  #: seconds between two looks
    #: whether a run that has finished may be started once more, to no effect but that its hosts are cleaned up
    again = True

    # ---- what differs by bed

    @abstractmethod
    def begin(self, folder: Path) -> None:
        """Start a new run in a folder of its own."""

    @abstractmethod
    def go_on(self) -> None:
        """Start the run again, which has ended."""

    @abstractmethod
    def processes(self) -> list[Process]:
        """All that lives of the run."""

    @abstractmethod
    def at_work(self) -> bool:
        """Whether somebody is still to bring the run on: its launcher lives, or it waits in a queue."""

    @abstractmethod
    def said(self) -> str:
        """What the run has said to its user since it was last started."""

    @abstractmethod
    def left(self) -> list[str]:
        """What is on disks and in shared memory that only a living run may have there."""

    @abstractmethod
    def close(self) -> None:
        """End whatever is left of the last run."""

    # ---- what does not

    def find(self, *words: str) -> list[Process]:
        """The processes whose command line has one of the words."""
        return [process for process in self.processes() if any(word in process.argv for word in words)]

    @property
    def attempt(self) -> int:
        """The number of the last attempt; -1 before the first."""
        return max((int(path.name) for path in self.root.glob("attempts/*") if path.name.isdigit()), default=-1)

    def steps(self) -> int:
        return len(metrics(self.root))

    def training(self) -> bool:
        """Whether the last attempt has trained a step of its own."""
        try:
            begun = json.loads((self.root / "attempts" / str(self.attempt) / "peers/trainer-0.json").read_text())
        except (OSError, ValueError):
            return False
        return self.steps() > begun["start"]

    def finished(self) -> bool:
        try:
            return json.loads((self.root / "summary.json").read_text())["status"] == "finished"
        except (OSError, ValueError):
            return False

    def error(self, attempt: int) -> str:
        """The first error of an attempt as it was recorded, "" if none was."""
        try:
            found = json.loads((self.root / "attempts" / str(attempt) / "error.json").read_text())
        except (OSError, ValueError):
            return ""
        return f"{found['role']}-{found['index']}: {found['message']}"

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait; AssertionError with what was awaited and what the run has said."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s\n{self.said()}\n{self.logs()}"
            time.sleep(self.look)

    def logs(self) -> str:
        files = sorted(self.root.glob(f"logs/attempt-{self.attempt}/*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in files)
