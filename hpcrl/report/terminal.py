"""What a terminal is shown, drawn by rich: a table of runs, the page of one that is watched, and bars.

Importing this takes some 50 ms, so it is imported where there is a terminal.  Invariants: text is shown as it is, never
read as rich's markup, and comes here without control characters; nothing that matters is cut on a narrow terminal: a
table leaves columns out, all else wraps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from hpcrl.report.run_status import Status
from hpcrl.report.status_text import cells, page

STYLES = {
    "running": "green", "saving": "green", "ending": "yellow",
    "finished": "green", "failed": "red", "lost": "red", "pending": "yellow",
    "requeued": "yellow",
}  # fmt: skip
#: columns of the table that a narrow terminal does without, those first that matter least
LEFT_OUT = ("STALE", "TOK/S", "LAST STEP", "JOB", "STAGE", "NEEDS", "REWARD")
#: columns that may be narrower than what they hold, down to this: paths continue in the next line, messages are cut
NARROWED = {"RUN": 36, "": 24}


def console(stream: TextIO) -> Console:
    """A console on a stream that is a terminal; characters that its encoding lacks are shown as ?."""
    if isinstance(stream, TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
        stream.reconfigure(errors="replace")
    return Console(file=stream, force_terminal=True, markup=False, emoji=False, highlight=False)


def runs_table(found: Sequence[Status], width: int) -> Table:
    """One line a run, as given, on a terminal of `width` columns."""
    columns = cells(found)
    natural = {head: max(map(cell_len, [head, *column])) + 2 for head, column in columns.items()}
    needed = {head: min(size, NARROWED.get(head, size)) for head, size in natural.items()}
    for head in LEFT_OUT:
        if head in needed and sum(needed.values()) > width:
            del needed[head]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head, size in needed.items():
        table.add_column(Text(head), no_wrap=head != "" and size == natural[head], overflow="fold")
    for row in zip(*(columns[head] for head in needed), strict=True):
        table.add_row(*(_cell(head, text) for head, text in zip(needed, row, strict=True)))
    return table


def _cell(head: str, text: str) -> Text:
    if head == "":
        return Text(text, no_wrap=True, overflow="ellipsis")
    return Text(text, style=STYLES.get(text, "") if head == "STATE" else "")


class LivePage:
    """The page of one run, drawn over the one before; what is shown last stays.  A context."""

    def __init__(self, stream: TextIO) -> None:
        self._live = Live(console=console(stream), auto_refresh=False)

    def __enter__(self) -> LivePage:
        self._live.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._live.stop()

    def show(self, status: Status) -> None:
        """Draw it as it is now."""
        self._live.update(Text(page(status), overflow="fold"), refresh=True)


class _BarAndNumbers(Progress):
    """A bar, and below it a text in as many lines as it takes."""

    numbers = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """What is drawn."""
        yield self.make_tasks_table(self.tasks)
        if self.numbers:
            yield Padding(Text(self.numbers), (0, 0, 0, 2), expand=False)


class ProgressBar:
    """One bar on a terminal: title, how many of how many, the time that has passed and the time that is left.

    Attributes:
        total: None if it is not known.
        size: whether what is counted are bytes. It draws when it is told to, and has no thread.
    """

    def __init__(self, stream: TextIO, title: str, total: int | None, size: bool = False) -> None:
        count: ProgressColumn = DownloadColumn() if size else MofNCompleteColumn()
        self._progress = _BarAndNumbers(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            count,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console(stream),
            auto_refresh=False,
            speed_estimate_period=3600.0,  # a step may take minutes
            redirect_stdout=sys.stdout.isatty(),  # what is printed meanwhile is above the bar
        )
        self._task = self._progress.add_task(title, total=total)
        self._progress.start()

    def show(self, title: str, done: int, total: int | None, numbers: str = "") -> None:
        """Draw it with these values; numbers are below."""
        self._progress.numbers = numbers
        self._progress.update(self._task, description=title, completed=done, total=total)
        self._progress.refresh()

    def close(self) -> None:
        """Leave it as it is."""
        self._progress.stop()
