"""`hpcrl status` and `hpcrl watch` of a sweep: all of its runs in one table, once or live.

Invariants: as of a run, they change nothing, and the scheduler is asked once for all runs.  A run that has surely ended
is neither looked at nor asked for again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcrl.commands.find_run import ASK, Ending, Jobs, alive
from hpcrl.report.run_files import Run
from hpcrl.report.run_status import Status, judge_run
from hpcrl.report.status_text import line, on_terminal
from hpcrl.report.sweep_table import BestEvaluations, SweepRow, SweepStatus, sweep_page, sweep_row, sweep_status
from hpcrl.run.started_runs import is_run
from hpcrl.run.sweep_file import SweepRun, read_sweep
from hpcrl.toolbox.signs import LastSign

EVERY = 3.0  #: seconds between looks at all runs


def look_at_sweep(root: Path) -> SweepStatus:
    """The status of a sweep.

    Raises:
        HpcrlError: if its record cannot be read.
    """
    return SweepView(root).look()


class SweepView:
    """A sweep that is looked at, perhaps again and again.

    Raises:
        HpcrlError: if its record cannot be read.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sweep = read_sweep(root)
        self._endings = {run.name: Ending() for run in self.sweep.runs}
        self._sure: dict[str, SweepRow] = {}  # the last word on those that have ended
        self._evaluations = BestEvaluations()
        self.ask()

    def ask(self) -> None:
        """Ask the scheduler for the runs that have not surely ended."""
        self.jobs = Jobs(Run(path) for path in self.sweep.roots(self.root) if path.name not in self._sure)

    @property
    def interval(self) -> float:
        """Seconds after which it should be asked again."""
        if self.jobs.note:
            return 60.0
        return min((ending.interval for name, ending in self._endings.items() if name not in self._sure), default=ASK)

    @property
    def ended(self) -> bool:
        """Whether all runs have."""
        return len(self._sure) == len(self.sweep.runs)

    def look(self) -> SweepStatus:
        """The status of the sweep now."""
        rows = [self._sure.get(run.name) or self._look_at(run) for run in self.sweep.runs]
        notes = [f"{self.jobs.note}; this is from the run directories alone"] if self.jobs.note else []
        return sweep_status(self.root, self.sweep, rows, notes)

    def _look_at(self, swept: SweepRun) -> SweepRow:
        run = Run(self.root / swept.name)
        row = sweep_row(swept, run, _status(run, self.jobs), self._evaluations)
        if self._endings[swept.name].sure(row.status):
            self._sure[swept.name] = row
        return row


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
    sweep, asked = SweepView(root), LastSign()
    with _view() as view:
        while True:
            if asked.due(sweep.interval):
                sweep.ask()
            found = sweep.look()
            view.show(found)
            if sweep.ended:
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
