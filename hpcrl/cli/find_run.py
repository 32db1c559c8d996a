"""Which run a command means, and what is known of it: the run directory, the launcher's process, Slurm.

Invariant: every command that looks at runs gets its facts here, and asks Slurm at most once for all of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrl.errors import UsageError
from hpcrl.launch.slurm.jobs import query_jobs
from hpcrl.report.run_files import Run, changed
from hpcrl.report.run_status import FRESH, WORKING, Status, judge_run
from hpcrl.run.job_files import OVER, STOP
from hpcrl.run.queued_job import JobKey, QueueAnswer, QueuedJob
from hpcrl.run.started_runs import is_run, known_runs
from hpcrl.utils.untrusted_files import as_given, open_regular
from hpcrl.utils.waiting import LastSign

if TYPE_CHECKING:
    import psutil

#: seconds between questions to Slurm; seconds until an end is believed
ASK = 15.0
PATIENCE = 5.0
MISSING = "name a run directory, its name, or its job ID; hpcrl status lists the runs"
#: a job's number; of a task of a job array ARRAY_TASK
NUMBER = re.compile(r"\d+(_\d+)?\Z")


# ---- which run


def find_run(word: str) -> Run:
    """The run that `word` names: a path, the last part of one that is known, or a job's number.

    Raises:
        UsageError: if there is none, or more than one.
    """
    with contextlib.suppress(PermissionError):
        path = as_given(word)
        for root in (path, path.parent):  # a stage's directory stands for its run
            if is_run(root) and (root == path or (path / "options.json").exists()):
                return Run(root)
    runs = [Run(root) for root in all_runs()]
    found = [run for run in runs if run.root.name == word]
    if NUMBER.match(word):
        found += [run for run in runs if run.job and run.job.job_id == word]
    if not found and Path(word).is_dir():
        raise UsageError(f"{word} is not a run directory: it has no recipe.json", MISSING)
    if not found:
        raise UsageError(f"there is no run {word}", MISSING)
    if len(found) > 1:
        raise UsageError(f"{word} may be {' or '.join(str(run.root) for run in found)}", "give the path")
    return found[0]


def all_runs() -> list[Path]:
    """The runs that the registry knows, and those in ./runs."""
    roots = {path.resolve(): path for path in known_runs()}
    with contextlib.suppress(OSError):  # the directory cannot be read
        for path in sorted(as_given("runs").iterdir()):
            with contextlib.suppress(OSError):
                if is_run(path):
                    roots.setdefault(path.resolve(), path)
    return sorted(roots.values())


# ---- what is known of it


def look_at_run(run: Run, jobs: Jobs | None = None) -> Status:
    """The status of one run, in full."""
    jobs = jobs or Jobs([run])
    status = judge_run(run, time.time(), jobs.word(run), alive(run))
    status.notes += [f"{jobs.note}; this is from the run directory alone"] if jobs.note else []
    return status


def look_at_runs(runs: Sequence[Run]) -> tuple[list[Status], str]:
    """(the statuses, those at work first and then the newest first; what Slurm did not tell)."""
    jobs = Jobs(runs)
    now = time.time()
    found = [(judge_run(run, now, jobs.word(run), alive(run), brief=True), _touched(run)) for run in runs]
    found.sort(key=lambda pair: (pair[0].phase in OVER or pair[0].phase == "lost", -pair[1]))
    return [status for status, _ in found], jobs.note


def _touched(run: Run) -> float:
    """When the run last said something, or was made."""
    if run.state:
        return run.state.time
    return changed(run.stage.root / "metrics.jsonl" if run.stage else run.root)


class Ending:
    """Tells a run that has ended from one that is about to be queued again: in a Slurm job, its launcher says
    that it stopped, then requeues the job.  A silent run gets the same while to speak up.
    """

    def __init__(self) -> None:
        self.since: LastSign | None = None
        self._jobs: Jobs | None = None
        self._asked = LastSign()

    @property
    def interval(self) -> float:
        """Seconds after which Slurm should be asked again."""
        if self._jobs and self._jobs.note:
            return 60.0
        return ASK if self.since is None else PATIENCE / 2

    def look(self, run: Run) -> Status:
        """The status of the run, for which Slurm is asked now and then."""
        if self._asked.due(self.interval) or self._jobs is None:
            self._jobs = Jobs([run])
        return look_at_run(run, self._jobs)

    def sure(self, found: Status) -> bool:
        """Whether the run has ended, as all looks of the last PATIENCE seconds had it."""
        if found.phase not in (*OVER, "lost"):
            self.since = None
            return False
        if found.phase == "finished" or (not found.queued and found.phase != "lost"):
            return True
        if self.since is None:
            self.since = LastSign()
        return self.since.silence >= PATIENCE


class Jobs:
    """Slurm's word on the jobs of some runs, asked for when made.  note: why there is none."""

    def __init__(self, runs: Iterable[Run]) -> None:
        keys = [key for run in runs if (key := _key(run))]
        answer = query_jobs(keys) if keys else QueueAnswer()
        self.jobs, self.note = answer.jobs, answer.note

    def word(self, run: Run) -> QueuedJob | None:
        """Slurm's word on the run's job; None if it has none, or could not be asked."""
        key = _key(run)
        return self.jobs.get(key) if key else None


def _key(run: Run) -> JobKey | None:
    """The run's job, as Slurm is asked for it; None if it has none."""
    if not run.job or not run.job.queued or not run.job.job_id:
        return None
    return JobKey(run.job.job_id, run.identity, run.job.submitted, history=not _quiet(run))


def _quiet(run: Run) -> bool:
    """Whether how its job ended has nothing to add: the run has had its last word, or speaks."""
    if run.state is None or (run.job and run.state.time < run.job.submitted):
        return False
    if run.state.phase == "stopped" and not (run.root / STOP).exists():
        return False  # a cancelled job's launcher says the same
    return run.state.phase in OVER or time.time() - run.state.time < FRESH


def alive(run: Run) -> bool | None:
    """Whether the launcher's process lives on this host; None if it may be on another, or need not be asked."""
    if run.state and (run.state.phase not in WORKING or run.state.host != socket.gethostname()):
        return None
    if run.job and run.job.queued:
        return None
    return owner(run.root) is not None if run.state else (owner(run.root) is not None or None)


def owner(root: Path) -> psutil.Process | None:
    """The launcher that holds the run directory, if it lives on this host: the process that root/lock names and that
    has this very file open.  A number that was given to another process since is not taken for it.
    """
    import psutil

    try:
        with open_regular(root / "lock") as file:  # a link would make it another run's
            pid, lock = int(file.read(20)), os.fstat(file.fileno())
        process = psutil.Process(pid)
        for opened in process.open_files():
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(opened.path), lock):
                    return process
    except (OSError, ValueError, OverflowError, psutil.Error):
        pass
    return None
