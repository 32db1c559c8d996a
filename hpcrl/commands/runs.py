"""`hpcrl runs`: which run directories there are, and the removal of those that never trained.

Invariant: only a run that has ended and holds neither a checkpoint nor a step's metrics is ever removed, and only on
--yes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hpcrl.commands.find_run import Parser, all_runs, look_at_runs
from hpcrl.plain_text import strip_control
from hpcrl.report.run_files import Run
from hpcrl.report.run_status import Status
from hpcrl.report.status_text import shorten_path

ENDED = ("failed", "cancelled", "lost", "stopped")


def runs(argv: list[str]) -> int:
    """`hpcrl runs`: one path a line; --clean: those that never came to a step, removed with --yes."""
    parser = Parser("runs", "The run directories that are known here and those in ./runs, one a line.")
    parser.add_argument("--clean", action="store_true", help="those alone that ended before their first step")
    parser.add_argument("--yes", action="store_true", help="remove these")
    args = parser.parse_args(argv)
    if args.yes and not args.clean:
        parser.error("--yes has no effect without --clean")
    found = {os.fsencode(run.root).decode(errors="replace"): run for run in map(Run, all_runs())}
    statuses, note = look_at_runs(list(found.values()))
    if args.clean:
        statuses = [status for status in statuses if _empty(status, found[status.run].root)]
        if note:
            parser.error(f"{note}, so it is not sure which runs have ended")
    for status in statuses:
        print(strip_control(shorten_path(status.run)))
        if args.yes:
            shutil.rmtree(found[status.run].root)
    if args.clean and not args.yes and statuses:
        print(f"{len(statuses)} runs never came to a step; hpcrl runs --clean --yes removes them")
    return 0


def _empty(status: Status, root: Path) -> bool:
    trained = any(path.stat().st_size for path in root.glob("**/metrics.jsonl")) or any(
        root.glob("**/latest_checkpointed_*")
    )
    return status.phase in ENDED and not trained
