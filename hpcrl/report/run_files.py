"""A run directory as files: what launcher, roles and trainer have left in it, for those who look from outside.

Invariants: it only reads; a file that is missing, half written or damaged counts as absent and, if it was there, is
noted; the cost does not grow with the length of the run, since of metrics.jsonl only the end is read.
"""

from __future__ import annotations

import contextlib
import os
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hpcrl.report.metrics import last_records
from hpcrl.run.attempt_log import Fault, faults_of, read_attempts
from hpcrl.run.engine_files import VIEW, EngineViews
from hpcrl.run.job_files import JOB, STATE, JobFile, JobState
from hpcrl.run.peers import TrainerPeer, peer_file
from hpcrl.run.rundir import ERROR, TRACKER, AttemptFailure
from hpcrl.run.started_runs import COPY, RECIPE, RecipeFile
from hpcrl.run.summary import SUMMARY, Summary
from hpcrl.utils.untrusted_files import Damaged, count_of, read_given_bytes, read_json, read_regular

T = TypeVar("T")


class StageSettings(msgspec.Struct):
    """What counts here of a stage's options.json."""

    num_rollout: int | None = None
    eval_interval: int | None = None
    save_interval: int | None = None


@dataclass
class StageFiles:
    """One stage's directory (the job's own, if its recipe has no stages)."""

    root: Path
    name: str
    notes: list[str] = field(default_factory=list)

    @cached_property
    def saved(self) -> int | None:
        """The steps of the last checkpoint in the run directory; None if there is none."""
        with contextlib.suppress(OSError):
            return count_of(read_given_bytes(self.root / "checkpoints" / TRACKER).decode(errors="replace").strip())
        return None

    @cached_property
    def settings(self) -> StageSettings:
        return load_json(self.root / "options.json", StageSettings, self.notes) or StageSettings()

    @cached_property
    def summary(self) -> Summary | None:
        return load_json(self.root / SUMMARY, Summary, self.notes)

    @cached_property
    def attempt(self) -> int | None:
        """The last attempt, or None if there was none."""
        return max((n for name in entries(self.root / "attempts") if (n := count_of(name)) is not None), default=None)

    @property
    def here(self) -> Path:
        return self.root / "attempts" / str(self.attempt)

    @property
    def logs(self) -> Path:
        return self.root / "logs" / f"attempt-{self.attempt}"

    @cached_property
    def failure(self) -> AttemptFailure | None:
        """The first error of the last attempt."""
        return load_json(self.here / ERROR, AttemptFailure, self.notes)

    @cached_property
    def faults(self) -> list[Fault]:
        """The attempts that have failed."""
        return faults_of(read_attempts(self.root))

    @cached_property
    def trainer_record(self) -> TrainerPeer | None:
        """What trainer rank 0 published in the last attempt, once it was up."""
        return load_json(peer_file(self.here, TrainerPeer, 0), TrainerPeer, self.notes)

    @cached_property
    def engines(self) -> EngineViews | None:
        """How the engines of the last attempt are."""
        return load_json(self.here / VIEW, EngineViews, self.notes)

    def log_of(self, failure: AttemptFailure) -> Path:
        """The log of the role that failed first, or the directory of the logs."""
        path = self.logs / f"{failure.role}-{failure.index}.log"
        if not path.is_file() and failure.role == "trainer":  # its ranks may share the log of the first on their host
            lower = [count_of(n[8:-4]) for n in entries(self.logs) if n.startswith("trainer-")]
            first = max((n for n in lower if n is not None and n <= failure.index), default=failure.index)
            path = self.logs / f"trainer-{first}.log"
        return path if path.is_file() else self.logs

    def rows(self, size: int, most: int = 1 << 20) -> list[dict[str, Any]]:
        """The last records, `most` at most, that are whole within the last `size` bytes of metrics.jsonl."""
        return last_records(self.root / "metrics.jsonl", most, size)


@dataclass
class Run:
    """One run directory.

    Attributes:
        notes: files that are damaged.
    """

    root: Path
    notes: list[str] = field(default_factory=list)

    @cached_property
    def job(self) -> JobFile | None:
        return load_json(self.root / JOB, JobFile, self.notes)

    @cached_property
    def state(self) -> JobState | None:
        return load_json(self.root / STATE, JobState, self.notes)

    @cached_property
    def recipe(self) -> RecipeFile | None:
        return load_json(self.root / RECIPE, RecipeFile, self.notes)

    @cached_property
    def identity(self) -> str:
        return self.recipe.identity if self.recipe else ""

    @cached_property
    def stages(self) -> list[StageFiles]:
        """The stages that have begun, in order."""
        if (self.root / "options.json").exists():
            return [StageFiles(self.root, "", self.notes)]
        found = []
        for name in entries(self.root):
            path = self.root / name / "options.json"
            if not name.startswith("."):
                try:
                    found.append((path.stat().st_mtime, name))
                except OSError:
                    continue
        return [StageFiles(self.root / name, name, self.notes) for _, name in sorted(found)]

    @cached_property
    def planned(self) -> list[str]:
        """The names of all the recipe's stages; none if it has no stages, or cannot be read."""
        try:
            stages = tomllib.loads(read_regular(self.root / COPY).decode()).get("stage", [])
            return [str(stage["name"]) for stage in stages]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.notes.append(f"{COPY} cannot be read")
            return []

    @cached_property
    def stage(self) -> StageFiles | None:
        """The stage at work: the one that the launcher names, or the last that has begun."""
        named = [s for s in self.stages if self.state and s.name == self.state.stage]
        return (named or self.stages or [None])[-1]

    @property
    def log(self) -> Path:
        """The log to read first after a failure: of the role that failed first, else the job's last, else their
        directory."""
        if self.stage and self.stage.failure:
            return self.stage.log_of(self.stage.failure)
        logs = self.root / "logs"
        outputs = [logs / name for name in entries(logs) if name.startswith("job-") and name.endswith(".out")]
        if outputs:
            return max(outputs, key=changed)
        return self.stage.logs if self.stage and self.stage.attempt is not None else logs


def changed(path: Path) -> float:
    """When a file was last written (unix time); 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def load_json(path: Path, kind: type[T], notes: list[str]) -> T | None:
    """A JSON file as `kind`, or None; a file that is there and cannot be read adds to `notes`."""
    try:
        return read_json(path, kind, strict=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        notes.append(f"{path}: {error.strerror}")
    except Damaged:
        notes.append(f"{path} is damaged")
    return None


def entries(directory: Path) -> list[str]:
    """What is in a directory, sorted; nothing if it cannot be read."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
