"""Timelines as inline SVG: what every process did when.

Invariants: pure; every text is escaped; what is drawn does not grow with the length of the run: a track has COLUMNS
pieces at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup

from hpcrl.report.page.charts import picture, ticks

COLUMNS = 1000
ROW, NAMES = 16, 130  #: height of a track, width of its name
#: what a slot does; each is a class, whose colour the page has
KINDS = ("training", "generating", "updating", "saving", "starting", "waiting", "lost")


class Bar(NamedTuple):
    """From begin to end (microseconds) a track did `kind`, one of KINDS."""

    begin: int
    end: int
    kind: str


def timeline(tracks: Sequence[tuple[str, Sequence[Bar]]], begin: int, end: int) -> Markup:
    """Tracks (name, what it did) from begin to end, in microseconds; a later bar covers an earlier one."""
    width, height = NAMES + COLUMNS + 10, ROW * len(tracks) + 24
    scale = COLUMNS / max(end - begin, 1)
    parts = []
    for row, (name, bars) in enumerate(tracks):
        y = ROW * row
        parts.append(Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(NAMES - 6, y + 11, name))
        parts.append(_box(0, COLUMNS, y, "waiting"))
        parts += [_box(first, last, y, kind) for first, last, kind in raster(bars, begin, end) if kind != "waiting"]
    for tick in ticks(0, max(end - begin, 1) / 1e6, 8):
        x = NAMES + tick * 1e6 * scale
        parts.append(Markup('<path d="M{:.1f} 0V{}" class="grid"/>').format(x, ROW * len(tracks)))
        parts.append(
            Markup('<text x="{:.1f}" y="{}" text-anchor="middle">{}</text>').format(x, height - 8, clock(tick))
        )
    return picture(width, height, parts, "timeline")


def _box(first: int, last: int, y: int, kind: str) -> Markup:
    return Markup('<rect x="{}" y="{}" width="{}" height="{}" class="{}"><title>{}</title></rect>').format(
        NAMES + first, y + 1, last - first, ROW - 3, kind, kind
    )


def raster(bars: Iterable[Bar], begin: int, end: int) -> list[tuple[int, int, str]]:
    """(first, behind the last, kind) of runs of COLUMNS columns, each of which shows what filled most of it."""
    width = max(end - begin, 1) / COLUMNS
    filled: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
    for bar in bars:
        first = max(bar.begin, begin) - begin
        last = min(bar.end, end) - begin
        for column in range(int(first / width), min(COLUMNS, math.ceil(last / width))) if last > first else ():
            part = min(last, (column + 1) * width) - max(first, column * width)
            filled[column][bar.kind] = filled[column].get(bar.kind, 0.0) + part
    shown = [
        max(column, key=lambda kind: column[kind]) if sum(column.values()) > width / 2 else "" for column in filled
    ]
    at, found = 0, []
    for kind, group in groupby(shown):
        size = len(list(group))
        if kind:
            found.append((at, at + size, kind))
        at += size
    return found


def clock(seconds: float) -> str:
    """1:02:03, 2:03 or 3.5 s."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
