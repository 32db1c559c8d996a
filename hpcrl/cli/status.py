"""`hpcrl status` and `hpcrl watch`: what runs are doing, once or live.

Invariants: both change nothing, anywhere; Slurm is asked a few times a minute, and less while it does not answer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.cli.find_run import Ending, all_runs, find_run, look_at_run, look_at_runs
from hpcrl.errors import Interrupted
from hpcrl.report.run_files import Run
from hpcrl.report.run_status import Status
from hpcrl.report.status_text import line, on_terminal, page, table
from hpcrl.utils.arguments import RUN, Parser
from hpcrl.utils.plain_text import strip_control

EVERY = 1.0  #: seconds between looks
#: what `watch` ends with
EXIT = {"finished": 0, "failed": 1, "cancelled": 1, "lost": 1, "stopped": 143}


def status(argv: list[str]) -> int:
    """`hpcrl status`: all runs as a table, or one in full."""
    parser = Parser("status", "List all runs of this machine and of ./runs, or show one in full.")
    parser.add_argument("run", nargs="?", metavar="RUN", help=RUN)
    parser.add_argument(
        "--json", action="store_true", help="for programs: one JSON object (a list of them without RUN)"
    )
    args = parser.parse_args(argv)
    if args.run:
        found = look_at_run(find_run(args.run))
        print(_json(found) if args.json else page(found))
        return 0
    many, note = look_at_runs([Run(root) for root in all_runs()])
    if args.json:
        print(_json(many))
    elif many and on_terminal(sys.stdout):
        from hpcrl.report import terminal

        console = terminal.console(sys.stdout)
        console.print(terminal.runs_table(many, console.width))
    elif many:
        print(table(many))
    else:
        print("no runs are known here; name a run directory, or go to where runs/ is")
    if note and not args.json:
        print(f"hpcrl: note: {strip_control(note)}; the run directories alone were read", file=sys.stderr)
    return 0


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


def watch(argv: list[str]) -> int:
    """`hpcrl watch`: a live view of one run, until it ends."""
    parser = Parser(
        "watch",
        "Follow one run until it ends. Exit status: 0 it finished, 1 it failed, 143 it was stopped; Ctrl-C only stops "
        "looking.",
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    args = parser.parse_args(argv)
    try:
        return watch_run(find_run(args.run).root)
    except KeyboardInterrupt:
        hint = f"to end it: hpcrl stop {strip_control(args.run)}; while it is pending: hpcrl cancel"
        raise Interrupted("the run itself continues", hint) from None


def watch_run(root: Path) -> int:
    """Follow a run until it has ended; the exit status that `watch` has."""
    from hpcrl.report.terminal import LivePage

    with LivePage(sys.stdout) if on_terminal(sys.stdout) else Lines() as view:
        ending = Ending()
        while True:
            found = ending.look(Run(root))
            view.show(found)
            if ending.sure(found):
                return EXIT[found.phase]
            time.sleep(EVERY)


class Lines:
    """A line for each change, where there is no terminal; at the end, where the log is.  A context."""

    def __init__(self) -> None:
        self.last = ""
        self.log = ""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self.log and kind is None:
            print(f"log: {self.log}", flush=True)

    def show(self, found: Status) -> None:
        """Print the line, unless it would say the same again."""
        text = line(found)
        self.log = strip_control(found.log or "")
        what = text if found.phase != "lost" else "lost"  # whose message grows older every second
        if what != self.last:
            print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
            self.last = what
