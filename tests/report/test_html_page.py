"""The page of a run: curves and timelines as SVG, whatever the numbers; samples that can do nothing to a browser."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.cli import main
from hpcrl.report.html_page import tokens_by_version
from hpcrl.report.svg import COLUMNS, FILL, POINTS, Bar, chart, clock, raster, ticks, timeline
from hpcrl.report.timeline.spans import ATTEMPT, BEGINS, GENERATE, READY, SAVED, STEP, TRAIN, WAIT
from tests.report.timeline.test_accounting import PLAN, head, lines, span
from tests.support.rundirs import NOW, log, make, put, steps

EVIL = "</pre><script>alert(1)</script> &amp; \x1b[31m \u202egnp.exe <img src=x onerror=y> {{ 1 }} {% x %}"

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
            assert 0 <= x <= 330 and -0.1 <= y <= 190.1
    assert not re.search(r' (?:points|d|c?x|c?y)="[^"]*(?:nan|inf)', picture)  # a label may well be "inf"


def test_a_curve_has_the_colour_that_its_legend_says() -> None:
    picture = str(chart("two", {"all": ([1.0, 2.0], [1.0, 2.0]), "part": ([1.0, 2.0], [0.5, 0.7])}))
    lines = re.findall(r'<polyline [^>]*stroke="([^"]+)"', picture)
    keys = re.findall(r'>(\w+)</text><rect [^>]*fill="([^"]+)"', picture)
    assert dict(keys) == {"all": lines[0], "part": lines[1]} and lines[0] != lines[1]


def test_a_long_curve_is_thinned() -> None:
    x = [float(i) for i in range(100_000)]
    picture = str(chart("long", {"": (x, x)}))
    (pale, mean) = re.findall(r'points="([^"]+)"', picture)
    assert len(pale.split()) <= POINTS and len(mean.split()) <= POINTS and len(picture) < 30_000


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
    assert [r.get("fill") for r in root.iter("rect")] == [FILL["waiting"], FILL["training"], FILL["waiting"]]
    assert "&lt;engine&gt;" in picture
    ET.fromstring(str(timeline([], 5, 5)))


def test_times_are_read_easily() -> None:
    assert [clock(s) for s in (0.25, 59, 61, 3725)] == ["0.25 s", "59 s", "1:01", "1:02:05"]


# ---- the commands


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two nodes that has ended; its samples are hostile."""
    root = make(tmp_path / "run", phase="finished")
    begun = (NOW - 1000) / 3600
    put(root / "attempts" / "0" / "plan.json", json.loads(PLAN_JSON))
    put(root / "attempts" / "0" / "peers" / "trainer-0.json", {"role": "trainer", "start": 0, "total": 3, "pid": 1})
    about = {"stage": "", "attempt": 0}
    lines(
        root / "timeline" / "launcher-0.jsonl", head("launcher", opened=begun), span(BEGINS, begun, **about),
        span(ATTEMPT, begun, begun + 0.2, status="finished", **about),
    )  # fmt: skip
    here = root / "timeline" / "attempt-0"
    trained = [
        row
        for n in range(3)
        for row in (
            span(WAIT, begun + 0.05 * (n + 1), begun + 0.05 * (n + 1) + 0.02),
            span(TRAIN, begun + 0.05 * (n + 1) + 0.02, begun + 0.05 * (n + 2)),
            span(STEP, begun + 0.05 * (n + 1), begun + 0.05 * (n + 2), rollout_id=n),
        )
    ]
    ready = span(READY, begun + 0.05, rollout_id=0)
    saved = span(SAVED, begun + 0.2, rollout_id=3)
    lines(here / "trainer-0.jsonl", head("trainer", opened=begun), ready, *trained, saved)
    lines(here / "rollout-0.jsonl", head("rollout", opened=begun), span(GENERATE, begun + 0.05, begun + 0.07, engine=0))
    log(
        root,
        *steps(3, **{"perf/wait_time_ratio": 0.4, "staleness/share/0": 0.9}),
        {"rollout_id": 2, "eval/<b>/accuracy": 0.5},
    )
    sample = {"group": 0, "index": 0, "prompt": EVIL, "response": EVIL, "label": EVIL, "reward": 1.0, "status": EVIL}
    (root / "samples").mkdir()
    (root / "samples" / "00000002.jsonl").write_text(json.dumps(sample) + "\n")
    (root / "recipe.toml").write_text(f"# {EVIL}\n")
    return root


PLAN_JSON = msgspec.json.encode(PLAN).decode()


def parts(html: str) -> tuple[set[str], set[str]]:
    """The tags and the attributes of a page."""
    tags, attributes = set[str](), set[str]()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.add(tag)
            attributes.update(name for name, _ in attrs)

    Reader().feed(html)
    return tags, attributes


def test_a_report_shows_everything_and_needs_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    html = (run / "report.html").read_text()
    assert "<script" not in html and "<img" not in html and "\x1b" not in html and "\u202e" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html and "{{ 1 }} {% x %}" in html  # shown, not obeyed
    tags, attributes = parts(html)
    assert tags.isdisjoint({"script", "img", "link", "iframe", "object", "use", "image"})
    assert attributes.isdisjoint({"src", "href", "xlink:href", "style"}) and not any(
        name.startswith("on") for name in attributes
    )
    assert not re.search(r"url\(|@import|https?://", html)
    assert html.count("<svg") > 7 and "idle share" in html and "The last 3 steps" in html
    for word in (
        "held-out accuracy",
        "&lt;b&gt; 0.500",
        "engine-0",
        "trainer-0",
        "total",
        "Step 2: the greatest reward",
    ):
        assert word in html, word


def test_custom_metrics_and_failures(run: Path) -> None:
    """A report draws what custom functions log and says what failed."""
    log(
        run,
        *(
            {"rollout_id": i, "rollout/reward/exact": 0.5, "rollout/<own>": 3.0, "rollout/reward_errors": 1.0}
            for i in (0, 1)
        ),
    )
    log(
        run,
        {"rollout_id": 1, "eval/a/accuracy": 0.5, "eval/a/pass@2": 0.6, "eval/a/majority@2": 0.4, "eval/a/mine": 1.0},
    )
    log(run, {"rollout_id": 2, "eval/a/accuracy": 0.75, "eval/a/reward/exact": 0.5, "my group/x": 1.0})
    assert main(["report", str(run)]) == 0
    html = (run / "report.html").read_text()
    titles = re.findall(r'class="title">([^<]*)<', html)
    assert titles[-4:] == ["failed gradings", "rollout/&lt;own&gt;", "eval/a/mine", "my group/x"]
    assert {"parts of the reward", "a: parts of the reward", "a: pass@k, majority@n"} <= set(titles)
    for word in (
        ">pass@2<",
        ">majority@2<",
        "a 0.500 -&gt; 0.750",
        "gradings failed and counted",
    ):
        assert word in html, word


def test_the_bill_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bill", str(run)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^training +0.09\d+ ", text, re.MULTILINE) and re.search(
        r"^total +0\.\d+ +100.0 %", text, re.MULTILINE
    ), text
    assert main(["bill", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["node_hours"].values()) == pytest.approx(found["total"], rel=1e-12) and found["total"] > 0
    assert found["allocations"][0]["nodes"] == {"n1": 2, "n2": 2, "n3": 0}


def test_a_trace_goes_where_it_is_wanted(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run), "-o", str(tmp_path / "t.json")]) == 0
    names = {event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert {"process_name", TRAIN, WAIT, STEP, GENERATE, READY} <= names
    capsys.readouterr()
    assert main(["trace", str(run), "-o", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["traceEvents"]


@pytest.mark.parametrize("name", ["report", "trace", "bill"])
def test_what_is_not_there_is_said(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = make(tmp_path / "old")
    assert main([name, str(old)]) == (0 if name == "report" else 2)
    assert name == "report" or "has no timeline" in capsys.readouterr().err
    assert main([name, str(tmp_path / "none")]) == 2
    if name != "bill":
        assert main([name, str(old), "-o", str(tmp_path / "no" / "where")]) == 2


def test_tokens_by_version() -> None:
    """Tokens are counted by the version that sampled them."""
    rows = [
        {"rollout_id": 0, "policy_version": 2, "staleness/tokens/0": 10.0},
        {
            "rollout_id": 1,
            "policy_version": 4,
            "staleness/tokens/0": 3.0,
            "staleness/tokens/2": 5.0,
            "staleness/tokens/8+": 1.0,
        },
        {"rollout_id": 1, "eval/x/accuracy": 1.0},
    ]
    assert tokens_by_version(rows) == {0: 15.0, 2: 3.0}
    assert tokens_by_version(rows[:1]) == {1: 10.0} and tokens_by_version([]) == {}, (
        "of one step it is taken to be one version"
    )
