"""Curves as SVG that show their values under the pointer, without a script: in the page, and `curves.svg` of a run.

Invariants: pure; every text is escaped; what is drawn does not grow with the length of the run: a curve has POINTS
points at most, a chart READINGS places that show their values; a colour is a class, so that the page decides what it
is in light and in dark.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from markupsafe import Markup, escape

from hpcrl.report.curves import MANY, Curves, Panel, panels_of, smooth
from hpcrl.report.metrics import read_metrics
from hpcrl.run.rundir import RunDir, write_atomic
from hpcrl.utils.untrusted_files import read_given

WIDTH, HEIGHT = 360, 196  #: of a chart, in its own units: it is as wide as its column
#: its margins
LEFT = 44
RIGHT = 8
TOP = 8
BOTTOM = 32
POINTS = 400
READINGS = 40
COLOURS = 8  #: of curves; the ninth has the first one's, and is dashed
LINE = 11  #: height of a line of text
ACROSS = 4  #: charts in a row of a picture
TITLE = 20  #: height of a chart's title there, and of its legend

#: from numbers to the picture's own units
Place = Callable[[float, float], tuple[float, float]]


def chart(title: str, curves: Curves, axis: str = "", keys: bool = True) -> Markup:
    """Curves over the steps that were done.

    Args:
        curves: label -> (steps, values), in the order of their colours; one without values takes its colour all the
            same.
        axis: as `hpcrl.report.curves.Panel` has it.
        keys: whether the chart has a legend of its own.
    """
    head = Markup("<figcaption>{}{}</figcaption>").format(title, legend(curves) if keys and len(curves) > 1 else "")
    return Markup('<figure class="chart">{}{}</figure>').format(head, picture(WIDTH, HEIGHT, plot(curves, axis), title))


def grid(title: str, panels: Sequence[tuple[Panel, Curves]]) -> Markup:
    """An SVG file of all panels, each with its title and legend."""
    columns = min(ACROSS, len(panels))
    height = HEIGHT + 2 * TITLE
    parts = [Markup("<style>{}</style>").format(style()), _text(WIDTH * columns / 2, TITLE, title, "middle")]
    for number, (panel, curves) in enumerate(panels):
        row, column = divmod(number, columns)
        words = [_text(LEFT, TITLE - 6, panel.title, "start")]
        if len(curves) > 1:
            names = [Markup('<tspan class="{}">{}  </tspan>').format(hue(at), label) for at, label in enumerate(curves)]
            words.append(
                Markup('<text x="{}" y="{}" class="of">{}</text>').format(LEFT, 2 * TITLE - 8, Markup("").join(names))
            )
        moved = Markup('<g transform="translate(0 {})">{}</g>').format(
            2 * TITLE, Markup("").join(plot(curves, panel.axis))
        )
        place = WIDTH * column, 2 * TITLE + height * row
        parts.append(Markup('<g transform="translate({} {})">{}{}</g>').format(*place, Markup("").join(words), moved))
    drawn = picture(WIDTH * columns, 2 * TITLE + height * -(-len(panels) // columns), parts, title)
    return Markup('<svg xmlns="http://www.w3.org/2000/svg"') + drawn.removeprefix("<svg")


def style() -> Markup:
    """The CSS of charts and timelines, in light and in dark."""
    return Markup(read_given(Path(__file__).with_name("pictures.css.j2")))


def _text(x: float, y: float, words: str, anchor: str) -> Markup:
    return Markup('<text x="{:.0f}" y="{:.0f}" text-anchor="{}" class="title">{}</text>').format(x, y, anchor, words)


def plot(curves: Curves, axis: str) -> list[Markup]:
    """The axes, the curves, and what the pointer shows, in WIDTH x HEIGHT."""
    log = axis == "log" and all(value > 0 for _, y in curves.values() for value in y)
    thin = {label: _thinned(x, y) for label, (x, y) in curves.items()}
    low, high = _range([value for _, y in thin.values() for value in y], axis, log)
    xs = [value for x, _ in thin.values() for value in x]
    first, last = min(xs), max(max(xs), min(xs) + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        y = math.log10(y) if log else y
        return (
            LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM),
        )

    parts = [*_across(low, high, log, at, first), *_along(first, last, at, 10**low if log else low)]
    for number, (x, y) in enumerate(thin.values()):
        if not y:
            continue
        parts += _curve(list(map(at, x, y)), hue(number))
        if len(y) >= MANY:
            parts.append(_line(list(map(at, x, smooth(y))), f"{hue(number)} mean"))
    return parts + _readings(thin, at)


def hue(number: int) -> str:
    """The classes of the curve of this number."""
    return f"c{number % COLOURS}" + (f" dash{min(number // COLOURS, 3)}" if number >= COLOURS else "")


def legend(labels: Iterable[str]) -> Markup:
    """Each label behind its colour."""
    keys = (
        Markup('<span class="key {}">{}</span>').format(hue(number), label)
        for number, label in enumerate(labels)
        if label
    )
    return Markup('<span class="keys">{}</span>').format(Markup("").join(keys))


# ---- axes


def _across(low: float, high: float, log: bool, at: Place, first: float) -> list[Markup]:
    """Grid lines with their values."""
    parts = []
    for tick in _log_ticks(low, high) if log else ticks(low, high, 4):
        _, y = at(first, 10**tick if log else tick)
        word = f"1e{tick:.0f}" if log else f"{tick:.4g}"
        parts.append(Markup('<path d="M{} {:.1f}H{}" class="grid"/>').format(LEFT, y, WIDTH - RIGHT))
        parts.append(Markup('<text x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(LEFT - 4, y + 3, word))
    return parts


def _along(first: float, last: float, at: Place, low: float) -> list[Markup]:
    """Steps under the curves, and what they are."""
    parts = [Markup('<text x="{}" y="{}" text-anchor="end">steps</text>').format(WIDTH - RIGHT, HEIGHT - 4)]
    for tick in ticks(first, last, 5):
        if tick == int(tick):
            x, _ = at(tick, low)
            parts.append(
                Markup('<text x="{:.1f}" y="{}" text-anchor="middle">{:.0f}</text>').format(
                    x, HEIGHT - BOTTOM + 13, tick
                )
            )
    return parts


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


# ---- curves


def _thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """As many points as can be seen: means of neighbours."""
    size = -(-len(x) // POINTS)
    if size <= 1:
        return list(x), list(y)
    blocks = range(0, len(x), size)
    return [x[min(b + size, len(x)) - 1] for b in blocks], [sum(y[b : b + size]) / len(y[b : b + size]) for b in blocks]


def _curve(points: list[tuple[float, float]], classes: str) -> list[Markup]:
    if len(points) >= MANY:
        return [_line(points, f"{classes} pale")]
    dots = (Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2" class="{}"/>').format(x, y, classes) for x, y in points)
    return [_line(points, classes), *dots]


def _line(points: list[tuple[float, float]], classes: str) -> Markup:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return Markup('<polyline points="{}" class="{}"/>').format(path, classes)


def _readings(curves: Mapping[str, tuple[list[float], list[float]]], at: Place) -> list[Markup]:
    """Upright strips over the chart; under the pointer each shows a line, and what every curve has there."""
    steps = sorted({x for xs, _ in curves.values() for x in xs})
    if len(steps) > READINGS:
        steps = [steps[round(i * (len(steps) - 1) / (READINGS - 1))] for i in range(READINGS)]
    values = {label: dict(zip(x, y, strict=True)) for label, (x, y) in curves.items()}
    some = next(y[0] for _, y in curves.values() if y)
    places = [at(step, some)[0] for step in steps]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(places)), WIDTH - RIGHT]
    return [
        _reading(step, x, edges[i], edges[i + 1], {label: here[step] for label, here in values.items() if step in here})
        for i, (step, x) in enumerate(zip(steps, places, strict=True))
    ]


def _reading(step: float, x: float, left: float, right: float, values: Mapping[str, float]) -> Markup:
    words = [f"step {step:.0f}", *(f"{label} {value:.5g}".strip() for label, value in values.items())]
    side, anchor = (x + 4, "start") if x < (LEFT + WIDTH) / 2 else (x - 4, "end")
    lines = Markup("").join(
        Markup('<tspan x="{:.1f}" dy="{}">{}</tspan>').format(side, LINE, word) for word in words[:14]
    )
    strip = Markup('<rect x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>').format(
        left, TOP, max(right - left, 0.1), HEIGHT - TOP - BOTTOM
    )
    return Markup('<g class="at">{}<path d="M{:.1f} {}V{}"/><text y="{}" text-anchor="{}">{}</text></g>').format(
        strip, x, TOP, HEIGHT - BOTTOM, TOP, anchor, lines
    )


def picture(width: int, height: int, parts: Iterable[Markup], name: str) -> Markup:
    """An SVG that is as wide as its place."""
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">'
    return Markup(head) + Markup("").join(parts) + Markup("</svg>")


def draw(rundir: RunDir, title: str = "") -> bool:
    """Draw curves.svg next to metrics.jsonl; False if there is nothing to draw, or the disk is full."""
    panels = panels_of(list(read_metrics(rundir.metrics_file)))
    if not panels:
        return False
    with contextlib.suppress(OSError):  # it can be drawn again; what went wrong with the run must not be hidden by it
        write_atomic(rundir.root / "curves.svg", str(grid(title or rundir.root.name, panels)).encode())
        return True
    return False
