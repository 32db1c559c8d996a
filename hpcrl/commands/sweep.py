"""`hpcrl status` and `hpcrl watch` of a sweep: all of its runs in one table, once or live.

Invariants: as of a run, they change nothing, and the scheduler is asked once for all runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.commands.find_run import Ending, Jobs, alive
from hpcrl.report.run_files import Run
from hpcrl.report.run_status import Status, judge_run
from hpcrl.report.status_text import line, on_terminal
from hpcrl.report.sweep_table import SweepStatus, sweep_page, sweep_status
from hpcrl.run.started_runs import is_run
from hpcrl.run.sweep_file import SweepFile, read_sweep
from hpcrl.toolbox.signs import LastSign

EVERY = 3.0  #: seconds between looks at all runs


def look_at_sweep(root: Path) -> SweepStatus:
    """The status of a sweep.

    Raises:
        HpcrlError: if its record cannot be read.
    """
    sweep = read_sweep(root)
    return _look(root, sweep, Jobs(map(Run, sweep.roots(root))))


def _look(root: Path, sweep: SweepFile, jobs: Jobs) -> SweepStatus:
    notes = [f"{jobs.note}; this is from the run directories alone"] if jobs.note else []
    return sweep_status(root, sweep, [_status(Run(path), jobs) for path in sweep.roots(root)], notes)


def _status(run: Run, jobs: Jobs) -> Status:
    try:
        there = is_run(run.root)
    except OSError:
        there = False
    if not there:
        return Status(str(run.root), "lost", "its directory is gone")
    return judge_run(run, time.time(), jobs.word(run), alive(run), jobs.title(run), brief=True)


def watch_sweep(root: Path) -> int:
    """Follow a sweep until the last of its runs has ended; 0 if all have finished, 143 if some were stopped and the
    others finished, else 1."""
    sweep = read_sweep(root)
    paths = sweep.roots(root)
    jobs, asked = Jobs(map(Run, paths)), LastSign()
    endings = {run.name: Ending() for run in sweep.runs}
    with _view() as view:
        while True:
            if asked.due(60.0 if jobs.note else min(ending.interval for ending in endings.values())):
                jobs = Jobs(map(Run, paths))
            found = _look(root, sweep, jobs)
            view.show(found)
            ended = [endings[row.name].sure(row.status) for row in found.runs]  # each of them looks
            if all(ended):
                return _exit_status([row.status.phase for row in found.runs])
            time.sleep(EVERY)


def _exit_status(phases: Sequence[str]) -> int:
    others = {*phases} - {"finished"}
    return 0 if not others else 143 if others == {"stopped"} else 1


def _view() -> Any:
    if not on_terminal(sys.stdout):
        return RunLines()
    from hpcrl.report.terminal import LivePage

    return LivePage(sys.stdout)


class RunLines:
    """A line for each change of a run, where there is no terminal; at the end the table.  A context."""

    def __init__(self) -> None:
        self.last: dict[str, str] = {}
        self.page = ""

    def __enter__(self) -> RunLines:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            print(f"\n{self.page}", flush=True)

    def show(self, found: SweepStatus) -> None:
        """Print the lines of the runs of which there is something new."""
        self.page = sweep_page(found)
        for row in found.runs:
            text = line(row.status)
            what = text if row.status.phase != "lost" else "lost"  # whose message grows older every second
            if self.last.get(row.name) != what:
                print(f"{time.strftime('%H:%M:%S')}  {row.name}  {text}", flush=True)
                self.last[row.name] = what
