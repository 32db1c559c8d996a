"""Curves and timelines as inline SVG.

Invariants: pure; every text is escaped; what is drawn does not grow with the length of the run: a curve has POINTS
points at most, a track of a timeline COLUMNS pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup, escape

from hpcrl.report.curves import COLOURS, MANY, Curves, smooth

WIDTH, HEIGHT = 330, 190  #: of a chart, in pixels
#: its margins
LEFT = 46
RIGHT = 8
TOP = 24
BOTTOM = 22
POINTS, COLUMNS = 400, 1000
ROW, NAMES = 16, 130  #: pixels: height of a track, width of its name
#: what a slot does -> colour
FILL = {
    "training": "#1f6fb4",
    "generating": "#3a9a5b",
    "updating": "#d9822b",
    "saving": "#8a5fbf",
    "starting": "#9aa0a6",
    "waiting": "#e8eaed",
    "lost": "#c5443c",
}


class Bar(NamedTuple):
    """From begin to end (microseconds) a track did `kind`, a key of FILL."""

    begin: int
    end: int
    kind: str


# ---- curves


def chart(title: str, curves: Curves, axis: str = "") -> Markup:
    """Curves over rollouts.

    Args:
        axis: as `hpcrl.report.curves.Panel` has it.
    """
    log = axis == "log" and all(value > 0 for _, y in curves.values() for value in y)
    thin = {label: _thinned(x, y) for label, (x, y) in curves.items()}
    every = [value for _, y in thin.values() for value in y]
    xs = [value for x, _ in thin.values() for value in x]
    low, high = _range(every, axis, log)
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        y = math.log10(y) if log else y
        return (
            LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM),
        )

    parts = [Markup('<text x="{}" y="14" class="title">{}</text>').format(LEFT, title)]
    for tick in _log_ticks(low, high) if log else ticks(low, high, 4):
        _, y = at(first, 10**tick if log else tick)
        word = f"1e{tick:.0f}" if log else f"{tick:.4g}"
        parts.append(Markup('<path d="M{} {:.1f}H{}" class="grid"/>').format(LEFT, y, WIDTH - RIGHT))
        parts.append(
            Markup('<text x="{}" y="{:.1f}" class="tick" text-anchor="end">{}</text>').format(LEFT - 4, y + 3, word)
        )
    for tick in ticks(first, last, 5):
        if tick == int(tick):
            x, _ = at(tick, 10**low if log else low)
            parts.append(
                Markup('<text x="{:.1f}" y="{}" class="tick" text-anchor="middle">{:.0f}</text>').format(
                    x, HEIGHT - 6, tick
                )
            )
    for colour, (label, (x, y)) in zip(COLOURS * len(thin), thin.items(), strict=False):
        parts += _curve(list(map(at, x, y)), colour, label, y[-1])
        if len(y) >= MANY:
            parts.append(_line(list(map(at, x, smooth(y))), colour, 1.8, 1.0))
    parts += _legend(thin)
    return _svg(WIDTH, HEIGHT, parts, title)


def _thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """As many points as can be seen: means of neighbours."""
    size = -(-len(x) // POINTS)
    if size <= 1:
        return list(x), list(y)
    blocks = range(0, len(x), size)
    return [x[min(b + size, len(x)) - 1] for b in blocks], [sum(y[b : b + size]) / len(y[b : b + size]) for b in blocks]


def _range(values: Sequence[float], axis: str, log: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        return math.floor(math.log10(low)), max(math.ceil(math.log10(high)), math.floor(math.log10(low)) + 1)
    if axis == "share" and low >= 0 and high <= 1:
        return 0.0, 1.0
    if axis == "zero":
        low = min(low, 0.0)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (low if axis == "zero" and low == 0 else low - room), high + room


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from low to high: steps of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * by for by in (1, 2, 5, 10) if power * by >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    step = max(1, math.ceil((high - low) / 5))
    return [float(power) for power in range(int(low), int(high) + 1, step)]


def _curve(points: list[tuple[float, float]], colour: str, label: str, last: float) -> list[Markup]:
    many = len(points) >= MANY
    name = Markup("<title>{}: {:.6g} at last</title>").format(label or "last", last)
    parts = [Markup("<g>{}{}</g>").format(name, _line(points, colour, 1.4, 0.35 if many else 1.0))]
    if not many:
        parts += [Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2" fill="{}"/>').format(x, y, colour) for x, y in points]
    return parts


def _line(points: list[tuple[float, float]], colour: str, width: float, opacity: float) -> Markup:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return Markup('<polyline points="{}" fill="none" stroke="{}" stroke-width="{}" opacity="{}"/>').format(
        path, colour, width, opacity
    )


def _legend(curves: Mapping[str, object]) -> list[Markup]:
    parts, x = [], WIDTH - RIGHT
    for colour, label in reversed(list(zip(COLOURS * len(curves), filter(None, curves), strict=False))):
        parts.append(Markup('<text x="{}" y="14" class="tick" text-anchor="end">{}</text>').format(x, label))
        x -= 6 * len(label) + 12
        parts.append(Markup('<rect x="{}" y="7" width="8" height="8" fill="{}"/>').format(x, colour))
        x -= 6
    return parts


# ---- timelines


def timeline(tracks: Sequence[tuple[str, Sequence[Bar]]], begin: int, end: int) -> Markup:
    """Tracks (name, what it did) from begin to end, in microseconds; a later bar covers an earlier one."""
    width, height = NAMES + COLUMNS + 10, ROW * len(tracks) + 24
    scale = COLUMNS / max(end - begin, 1)
    parts = []
    for row, (name, bars) in enumerate(tracks):
        y = ROW * row
        parts.append(
            Markup('<text x="{}" y="{}" class="tick" text-anchor="end">{}</text>').format(NAMES - 6, y + 11, name)
        )
        parts.append(_box(0, COLUMNS, y, "waiting"))
        parts += [_box(first, last, y, kind) for first, last, kind in raster(bars, begin, end) if kind != "waiting"]
    for tick in ticks(0, max(end - begin, 1) / 1e6, 8):
        x = NAMES + tick * 1e6 * scale
        parts.append(Markup('<path d="M{:.1f} 0V{}" class="grid"/>').format(x, ROW * len(tracks)))
        parts.append(
            Markup('<text x="{:.1f}" y="{}" class="tick" text-anchor="middle">{}</text>').format(
                x, height - 8, clock(tick)
            )
        )
    return _svg(width, height, parts, "timeline")


def _box(first: int, last: int, y: int, kind: str) -> Markup:
    return Markup('<rect x="{}" y="{}" width="{}" height="{}" fill="{}"><title>{}</title></rect>').format(
        NAMES + first, y + 1, last - first, ROW - 3, FILL[kind], kind
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


def _svg(width: int, height: int, parts: Iterable[Markup], name: str) -> Markup:
    head = (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{escape(name)}">'
    )
    return Markup(head) + Markup("").join(parts) + Markup("</svg>")
