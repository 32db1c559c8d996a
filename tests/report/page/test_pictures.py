"""Charts and timelines as SVG: whole whatever the numbers, in the colours that their legends say, bounded in size."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.report.page.charts import HEIGHT, POINTS, READINGS, WIDTH, chart, hue, ticks
from hpcrl.report.page.timeline_picture import COLUMNS, Bar, clock, raster, timeline

numbers = st.floats(-1e12, 1e12, allow_nan=False) | st.integers(-3, 3).map(float)


@given(
    st.dictionaries(st.text(max_size=8), st.lists(numbers, min_size=1, max_size=60), min_size=1, max_size=5),
    st.sampled_from(["", "share", "zero", "log"]),
    st.integers(-1, 10**6),
)
def test_a_chart_is_whole_whatever_the_numbers(values: dict, axis: str, start: int) -> None:
    curves = {label: ([float(start + i) for i in range(len(y))], y) for label, y in values.items()}
    picture = str(chart("a < b", curves, axis))
    ET.fromstring(re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", "", picture))
    for match in re.finditer(r'points="([^"]+)"', picture):
        for point in match[1].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= WIDTH and -0.1 <= y <= HEIGHT + 0.1
    assert not re.search(r' (?:points|d|c?x|c?y)="[^"]*(?:nan|inf)', picture)  # a label may well be "inf"


def test_a_curve_has_the_colour_that_its_legend_says() -> None:
    curves = {f"run {n}": ([1.0, 2.0], [1.0, n + 2.0]) for n in range(10)}
    picture = str(chart("ten", curves))
    drawn = re.findall(r'<polyline [^>]*class="([^"]+)"', picture)
    keys = re.findall(r'<span class="key ([^"]+)">([^<]+)</span>', picture)
    assert [name for _, name in keys] == list(curves)
    assert [classes for classes, _ in keys] == drawn == [hue(n) for n in range(10)] and len(set(drawn)) == 10


def test_a_curve_without_values_keeps_its_colour() -> None:
    picture = str(chart("two", {"a": ([], []), "b": ([1.0], [2.0])}, keys=False))
    assert re.findall(r'<polyline [^>]*class="([^"]+)"', picture) == [hue(1)] and "key" not in picture


def test_a_long_curve_is_thinned() -> None:
    x = [float(i) for i in range(100_000)]
    picture = str(chart("long", {"": (x, x)}))
    (pale, mean) = re.findall(r'points="([^"]+)"', picture)
    assert len(pale.split()) <= POINTS and len(mean.split()) <= POINTS and len(picture) < 40_000


def test_values_are_read_off_a_chart() -> None:
    """Strips cover the chart from end to end, and each shows what every curve has at its step."""
    x = [float(i) for i in range(1, 101)]
    picture = str(chart("read", {"a": (x, x), "b": (x[50:], x[50:])}))
    found = re.findall(r'<g class="at"><rect x="([\d.]+)" y="\d+" width="([\d.]+)".*?<text[^>]*>(.*?)</text>', picture)
    assert len(found) == READINGS
    for (left, width, _), (following, _, _) in itertools.pairwise(found):
        assert float(left) + float(width) == pytest.approx(float(following), abs=0.2)
    assert re.findall(r">([^<]+)</tspan>", found[0][2]) == ["step 1", "a 1"]
    assert re.findall(r">([^<]+)</tspan>", found[-1][2]) == ["step 100", "a 100", "b 100"]


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [(0, 1, 4, [0, 0.5, 1]), (0, 10, 5, [0, 2, 4, 6, 8, 10]), (-1, 1, 4, [-1, -0.5, 0, 0.5, 1]), (3, 470, 5, [100, 200, 300, 400])],
)  # fmt: skip
def test_ticks_are_round(low: float, high: float, count: int, expected: list[float]) -> None:
    assert ticks(low, high, count) == pytest.approx(expected)


def test_a_column_shows_what_filled_most_of_it() -> None:
    unit = 1000  # microseconds a column
    bars = [
        Bar(0, 10 * unit, "training"),
        Bar(10 * unit, 10 * unit + 400, "saving"),
        Bar(12 * unit, 12 * unit + 600, "saving"),
    ]
    bars += [
        Bar(20 * unit, 20 * unit + 300, "training"),
        Bar(20 * unit + 300, 21 * unit, "generating"),
        Bar(30, 5, "lost"),
    ]
    assert raster(bars, 0, COLUMNS * unit) == [(0, 10, "training"), (12, 13, "saving"), (20, 21, "generating")]
    many = [Bar(i, i + 1, "training") for i in range(0, 20_000, 2)]
    assert len(raster(many, 0, 20_000)) <= COLUMNS


def test_a_timeline_is_drawn_in_its_colours() -> None:
    picture = str(timeline([("trainer-0", [Bar(0, 500, "training")]), ("<engine>", [])], 0, 1000))
    root = ET.fromstring(picture)
    assert [r.get("class") for r in root.iter("rect")] == ["waiting", "training", "waiting"]
    assert "&lt;engine&gt;" in picture
    ET.fromstring(str(timeline([], 5, 5)))


def test_times_are_read_easily() -> None:
    assert [clock(s) for s in (0.25, 59, 61, 3725)] == ["0.25 s", "59 s", "1:01", "1:02:05"]
