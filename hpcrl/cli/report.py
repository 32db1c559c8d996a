"""`hpcrl report`: a run as a page, as a timeline for Perfetto, or as curves of a tracker.

Invariant: it only reads the run. It writes one file, whole or not at all, or the record of what it sent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.cli.find_run import Jobs, find_run, look_at_run
from hpcrl.errors import UsageError
from hpcrl.report.page.comparison import MOST, Compared, comparison, names_of
from hpcrl.report.page.one_run import page
from hpcrl.report.run_files import Run
from hpcrl.report.timeline.node_hours import node_hours
from hpcrl.report.timeline.reading import read_run, trace
from hpcrl.report.trackers.record import Sender
from hpcrl.run.rundir import write_atomic
from hpcrl.utils.arguments import RUN, Parser


def report(argv: list[str]) -> int:
    """`hpcrl report`: a page, a trace or a tracker's curves of one run, or a page that compares several."""
    parser = Parser(
        "report",
        "Write one HTML file with curves, timeline, costs and samples, which needs no network. Of several runs: "
        "options that differ, curves over each other, costs, and answers to the same prompts side by side.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help=RUN)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write it (RUN/report.html, or comparison.html); - for stdout"
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="write what every process did when (RUN/trace.json), for https://ui.perfetto.dev or chrome://tracing",
    )
    parser.add_argument(
        "--to", metavar="TRACKER", help="send what is new to wandb, trackio or mlflow, also while the run trains"
    )
    args = parser.parse_args(argv)
    runs = _several(args.runs)
    if (args.trace or args.to) and len(runs) > 1:
        parser.error(f"--{'trace' if args.trace else 'to'} takes one run")
    if args.to:
        return _send(runs[0], args.to)
    if args.trace:
        recorded = read_run(runs[0])
        if not recorded.launchers:
            raise UsageError(f"{runs[0].root} has no timeline", "the run has not begun")
        text = json.dumps(trace(recorded.tracks, runs[0].root.name), separators=(",", ":")) + "\n"
        _write(args.output, runs[0].root / "trace.json", text, runs[0])
        return 0
    if len(runs) > 1:
        _write(args.output, Path("comparison.html"), _compared_page(runs), *runs)
        return 0
    run = runs[0]
    _write(args.output, run.root / "report.html", run_page(run), run)
    return 0


def _several(words: Sequence[str]) -> list[Run]:
    """The runs that words name.

    Raises:
        UsageError: if one names none, or they are more than a page can show.
    """
    found = {run.root.resolve(): run for run in map(find_run, words)}
    if len(words) > 1 and len(found) == 1:
        raise UsageError("all of them are the same run", "name it once")
    if len(found) > MOST:
        raise UsageError(f"{len(found)} runs are too many for one page: at most {MOST}", "name some of them")
    return list(found.values())


def run_page(run: Run) -> str:
    """The page of one run, as it is now."""
    return page(run, look_at_run(run), read_run(run))


def _compared_page(runs: Sequence[Run]) -> str:
    """The page of several runs, as they are now; Slurm is asked once for all."""
    jobs = Jobs(runs)
    named = zip(names_of(runs), runs, strict=True)
    compared = [Compared(name, run, look_at_run(run, jobs), node_hours(run, read_run(run))) for name, run in named]
    return comparison(compared)


def _send(run: Run, tracker: str) -> int:
    """Send what is new of a run to a tracker."""
    sender = Sender(tracker)
    page = run.root / "report.html"
    found = list(sender.send_new(run, page if page.is_file() else None))
    for name, records, place in found:
        print(f"{name}: {records} records, {place}")
    if not found:
        print(f"nothing new in {run.root}")
    _notes(run)
    return 0


def _write(given: str | None, usual: Path, text: str, *runs: Run) -> None:
    """Write a file, and say where it is.

    Raises:
        UsageError: if that cannot be.
    """
    if given == "-":
        sys.stdout.write(text)
    else:
        path = usual if given is None else Path(given)
        if path.is_dir() or not path.parent.is_dir():
            raise UsageError(f"cannot write {path}", "name a file in an existing directory")
        write_atomic(path, text.encode("utf-8", errors="replace"))
        print(path)
    _notes(*runs)


def _notes(*runs: Run) -> None:
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        print(f"hpcrl: note: {note}", file=sys.stderr)
