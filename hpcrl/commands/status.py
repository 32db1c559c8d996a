"""`hpcrl status` and `hpcrl watch`: what runs are doing, once or live.

Invariant: nothing is changed, anywhere; a scheduler is asked a few times a minute, and less while it does not answer.
"""

from __future__ import annotations

import shutil
import sys
import time

import msgspec

from hpcrl.commands.find_run import Ending, Jobs, Parser, all_runs, find_run, look_at_run, look_at_runs
from hpcrl.report.run_files import Run
from hpcrl.report.run_status import Status
from hpcrl.report.status_text import line, page, plain, table

EVERY = 1.0  #: seconds between looks
#: what `watch` ends with
EXIT = {"finished": 0, "failed": 1, "cancelled": 1, "lost": 1, "stopped": 143}


def status(argv: list[str]) -> int:
    """`hpcrl status`: all runs as a table, or one in full."""
    parser = Parser("status", "What runs are doing: all that are known here and those in ./runs, or one in full.")
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run directory, its last part, or its job's number")
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object (a list of them without RUN)")
    args = parser.parse_args(argv)
    if args.run:
        found = look_at_run(find_run(args.run))
        print(_json(found) if args.json else page(found))
        return 0
    many, note = look_at_runs([Run(root) for root in all_runs()])
    if args.json:
        print(_json(many))
    elif many:
        terminal = sys.stdout.isatty()
        print(table(many, shutil.get_terminal_size().columns if terminal else None, colour=terminal))
    else:
        print("no runs are known here; name a run directory, or go to where runs/ is")
    if note and not args.json:
        print(f"hpcrl: note: {plain(note)}; this is from the run directories alone", file=sys.stderr)
    return 0


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


def watch(argv: list[str]) -> int:
    """`hpcrl watch`: a live view of one run until it ends."""
    parser = Parser(
        "watch",
        "Follow one run until it ends. Exit status: 0 it finished, 1 it failed, 143 it was stopped; Ctrl-C only stops looking.",
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, its last part, or its job's number")
    root = find_run(parser.parse_args(argv).run).root
    view = Screen() if sys.stdout.isatty() else Lines()
    jobs, asked, ending = Jobs([Run(root)]), time.monotonic(), Ending()
    while True:
        now = time.monotonic()
        if now - asked > (60.0 if jobs.note else ending.interval):
            jobs, asked = Jobs([Run(root)]), now
        found = look_at_run(Run(root), jobs)
        view.show(found)
        if ending.sure(found):
            view.close(found)
            return EXIT[found.phase]
        time.sleep(EVERY)


class Screen:
    """A page that is drawn over the one before, on a terminal."""

    def __init__(self) -> None:
        self.lines = 0

    def show(self, found: Status) -> None:
        width, height = shutil.get_terminal_size()
        text = [row[: width - 1] for row in page(found).splitlines()][: height - 1]  # a wrapped line would not be drawn over
        up = f"\x1b[{self.lines}A" if self.lines else ""
        sys.stdout.write(f"{up}\r\x1b[J" + "\n".join(text) + "\n")
        sys.stdout.flush()
        self.lines = len(text)

    def close(self, found: Status) -> None:
        up = f"\x1b[{self.lines}A" if self.lines else ""
        print(f"{up}\r\x1b[J{page(found)}", flush=True)  # whole, for it stays


class Lines:
    """A line for each change, where there is no terminal."""

    def __init__(self) -> None:
        self.last = ""

    def show(self, found: Status) -> None:
        text = line(found)
        what = text if found.phase != "lost" else "lost"  # whose message grows older every second
        if what != self.last:
            print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
            self.last = what

    def close(self, found: Status) -> None:
        if found.log:
            print(f"log: {found.log}", flush=True)
