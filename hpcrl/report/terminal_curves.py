"""Curves of a run in a terminal: the panels of curves.png as small pictures in braille, or in ASCII where the terminal
has no UTF-8.

Invariants: pure but for the reading of metrics.jsonl, each byte once; what is drawn fits the given columns and rows,
and is nothing where they do not hold one picture; a step that a resumed run repeats is drawn once, as it came last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from hpcrl.plain_text import strip_control
from hpcrl.report.curves import PANELS, Curves, Panel, panels_of
from hpcrl.report.file_tail import FileTail
from hpcrl.report.metrics import number, parse_record, step_rows
from hpcrl.report.page.panels import is_flat

LEAST_COLUMNS, MOST_COLUMNS = 36, 60  #: of one picture, with its axis
LEAST_ROWS, MOST_ROWS = 6, 10  #: of one picture, with its title and the steps below it
GAP = 2  #: columns between two pictures
AXIS = 10  #: columns of the values at the left
COLOURS = ("cyan", "yellow", "green", "magenta")
#: bit of each dot of a braille character, by row and column
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
#: of a cell that is two dots high and one wide, by the sum of its dots' bits
ASCII = " '.:"
DRAWN = [metric for panel in PANELS for metric in panel.metrics.values()]
ENDS = tuple(metric.partition("*")[::2] for metric in (*DRAWN, "eval/*/right_or_wrong"))


class DrawnRows:
    """What a metrics.jsonl has said so far of the metrics that are drawn."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail = FileTail(path)
        self._starts = 0
        self._rows: dict[int, dict[str, Any]] = {}

    def read(self) -> list[dict[str, Any]]:
        """The records of each rollout id as one, in their order."""
        while lines := self._tail.new():
            if self._starts != self._tail.starts:  # cut or replaced: all of it comes again
                self._starts = self._tail.starts
                self._rows.clear()
            for row in filter(None, map(parse_record, lines)):
                self._add(row)
        return [self._rows[at] for at in sorted(self._rows)]

    def _add(self, row: dict[str, Any]) -> None:
        now = row["rollout_id"]
        if step_rows([row]) and now in self._rows and now < max(self._rows):
            self._rows = {at: kept for at, kept in self._rows.items() if at < now}
        kept = {name: value for name, value in row.items() if number(value) and _drawn(name)}
        self._rows[now] = self._rows.get(now, {"rollout_id": now}) | kept


def _drawn(name: str) -> bool:
    return any(name.startswith(before) and name.endswith(after) for before, after in ENDS)


def pictures(rows: Sequence[dict[str, Any]], columns: int, height: int, ascii_only: bool) -> list[Text]:
    """As many of the panels as there is room for, as lines of text; none if nothing is logged that changes.

    Args:
        rows: records as `DrawnRows` has them.
        height: rows of the terminal that are free.
    """
    abreast = max(1, (columns + GAP) // (LEAST_COLUMNS + GAP))
    lines = height // LEAST_ROWS
    if columns < LEAST_COLUMNS or lines < 1:
        return []
    found = [(panel, curves) for panel, curves in panels_of(rows) if not is_flat(panel, curves.values())]
    found = [(panel, curves) for panel, curves in found if max(len(x) for x, _ in curves.values()) > 1]
    found = found[: abreast * lines]
    if not found:
        return []
    abreast = min(abreast, len(found))
    lines = -(-len(found) // abreast)
    width = min(MOST_COLUMNS, (columns + GAP) // abreast - GAP)
    tall = min(MOST_ROWS, height // lines)
    drawn = [picture(panel, curves, width, tall, ascii_only) for panel, curves in found]
    shown = []
    for first in range(0, len(drawn), abreast):
        for line in zip(*drawn[first : first + abreast], strict=True):
            shown.append(Text(" " * GAP, no_wrap=True).join(line))
    return shown


def picture(panel: Panel, curves: Curves, width: int, height: int, ascii_only: bool) -> list[Text]:
    """One panel: `height` lines of `width` columns.  The title has the last value of each curve."""
    values = [value for _, y in curves.values() for value in y]
    log = panel.axis == "log" and min(values) > 0
    low, high = min(values), max(values)
    first, last = (end(at for x, _ in curves.values() for at in x) for end in (min, max))
    canvas = Canvas(width - AXIS, height - 2, ascii_only)
    scaled = lambda value: math.log10(value) if log else value  # noqa: E731
    for colour, (x, y) in enumerate(curves.values()):
        across = [_place(at, first, last, canvas.dots_across) for at in x]
        down = [
            canvas.dots_down - 1 - _place(scaled(value), scaled(low), scaled(high), canvas.dots_down) for value in y
        ]
        canvas.draw(across, down, colour % len(COLOURS))
    corner, tick, side = ("+", "+", "|") if ascii_only else ("└", "┤", "│")
    marks = {0: f"{high:.3g}", height - 3: f"{low:.3g}"} if high > low else {(height - 3) // 2: f"{high:.3g}"}
    body = [
        Text.assemble((f"{marks.get(row, ''):>{AXIS - 2}} {tick if row in marks else side}", "dim"), line)
        for row, line in enumerate(canvas.lines())
    ]
    begin, end = f"{first:.0f}", f"{last:.0f} steps"
    below = Text(f"{corner:>{AXIS}}{begin}{end:>{max(width - AXIS - len(begin), 0)}}", "dim")
    return [_cut(line, width) for line in [_title(panel, curves, width, ascii_only), *body, below]]


def _title(panel: Panel, curves: Curves, width: int, ascii_only: bool) -> Text:
    """What it is, and the last value of as many curves as there is room for: half a number would be another one."""
    title = Text.assemble((panel.title, "bold"))
    for colour, (label, (_, y)) in enumerate(curves.items()):
        name = strip_control(label)
        name = name.encode("ascii", "replace").decode() if ascii_only else name
        said = f"  {name} {y[-1]:.3g}" if name else f"  {y[-1]:.3g}"
        if title.cell_len + cell_len(said) > width:
            break
        title.append(said, COLOURS[colour % len(COLOURS)])
    return title


def _cut(line: Text, width: int) -> Text:
    """Exactly so many columns."""
    line.no_wrap = True
    line.truncate(width, overflow="crop", pad=True)
    return line


def _place(value: float, low: float, high: float, count: int) -> int:
    """Which of `count` dots, from 0; the middle one where all values are the same."""
    share = (value - low) / (high - low) if high > low else 0.5
    return min(count - 1, max(0, round(share * (count - 1))))


class Canvas:
    """Dots in the cells of a terminal.

    Attributes:
        dots_across: two a cell in braille, else one.
        dots_down: four a cell in braille, else two.
    """

    def __init__(self, columns: int, rows: int, ascii_only: bool) -> None:
        self._columns, self._rows = columns, rows
        self._ascii = ascii_only
        self._wide, self._high = (1, 2) if ascii_only else (2, 4)
        self.dots_across, self.dots_down = columns * self._wide, rows * self._high
        self._cells: dict[tuple[int, int], tuple[int, int]] = {}

    def draw(self, across: Sequence[int], down: Sequence[int], colour: int) -> None:
        """A line through points, which go from left to right."""
        before: tuple[int, int] | None = None
        for x, y in zip(across, down, strict=True):
            then, there = before or (x, y)
            steps = max(abs(x - then), abs(y - there), 1)
            for step in range(steps + 1):
                self._dot(round(then + (x - then) * step / steps), round(there + (y - there) * step / steps), colour)
            before = (x, y)

    def _dot(self, x: int, y: int, colour: int) -> None:
        cell = (y // self._high, x // self._wide)
        bit = 1 << (y % 2) if self._ascii else BRAILLE[y % 4][x % 2]
        self._cells[cell] = (self._cells.get(cell, (0, 0))[0] | bit, colour)

    def lines(self) -> list[Text]:
        """The cells, row by row."""
        return [self._line(row) for row in range(self._rows)]

    def _line(self, row: int) -> Text:
        line = Text()
        for column in range(self._columns):
            bits, colour = self._cells.get((row, column), (0, -1))
            shown = ASCII[bits] if self._ascii else chr(0x2800 + bits) if bits else " "
            line.append(shown, COLOURS[colour] if bits else "")
        return line


def has_utf8(encoding: str, environment: Mapping[str, str]) -> bool:
    """Whether a terminal shows more than ASCII: the stream's encoding and the locale's are UTF-8.

    Python writes UTF-8 under the locale C too, which says nothing of the terminal; where no locale is named at all, it
    is taken at its word.
    """
    named = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := environment.get(name))), "UTF-8")
    return all(text.lower().replace("-", "").endswith("utf8") for text in (encoding, named.partition("@")[0]))
