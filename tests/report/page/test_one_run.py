"""The page of a run: it shows everything and needs nothing; samples that can do nothing to a browser."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.report.page.one_run import spread
from hpcrl.report.timeline.spans import GENERATE, READY, STEP, TRAIN, WAIT
from tests.support.rundirs import log, make, put


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
    assert html.count("<svg") > 6 and "idle share" in html and "The last 3 steps" in html
    for word in (
        "held-out accuracy",
        "&lt;b&gt; 0.500",
        "engine-0",
        "trainer-0",
        "total",
        "Step 2: the greatest reward",
    ):
        assert word in html, word


def flat_part(html: str) -> str:
    """What is folded up because it stays the same."""
    return html.partition("that stay the same")[2].partition("</details>")[0]


def test_what_stays_the_same_is_folded_up(run: Path) -> None:
    """A loss that is noise is no picture; a reward always is one."""
    log(run, *({"rollout_id": i, "train/loss": 1e-8 * i, "perf/step_time": 2.0 + i} for i in (3, 4)))
    (run / "metrics.jsonl").write_text(
        "".join(
            f"{line}\n" for line in (run / "metrics.jsonl").read_text().splitlines() if '"train/loss": 0.1' not in line
        )
    )
    log(run, {"rollout_id": 5, "rollout/reward": 0.5}, {"rollout_id": 6, "rollout/reward": 0.5})
    assert main(["report", str(run)]) == 0
    html = (run / "report.html").read_text()
    drawn = re.findall(r"<figcaption>([^<]*)<", html)
    assert "<td>loss</td><td>4e-08</td>" in flat_part(html) and "loss" not in drawn
    assert "reward" in drawn and "seconds per step" in drawn


def test_how_it_was_run(run: Path) -> None:
    begun = {"path": "x.toml", "overrides": {"lr": 1e-5}, "identity": "i", "commit": "c0ffee" * 7}
    put(run / "recipe.json", begun)
    put(
        run / "attempts" / "0" / "peers" / "trainer-0.json",
        {"role": "trainer", "start": 0, "total": 3, "pid": 1, "device": "H100", "versions": {"torch": "2.13.0"}},
    )
    assert main(["report", str(run)]) == 0
    html = (run / "report.html").read_text().partition("How it was run")[2]
    for word in (
        "c0ffee" * 7,
        "lr = 1e-05",
        "<td>H100</td>",
        "torch 2.13.0",
        "<th>hosts of trainer</th>",
        "<td>num_rollout</td><td>10</td>",
    ):
        assert word in html, word
    assert "<td>eval_interval</td>" not in html, "a default is not repeated"


def test_samples_of_steps_from_the_first_to_the_last(run: Path) -> None:
    assert spread(list(range(100)), 4) == [0, 33, 66, 99] and spread([1, 2], 4) == [1, 2]
    for step in (0, 1):
        sample = {
            "group": 0,
            "index": 0,
            "prompt": "p",
            "response": f"of step {step}",
            "reward": 1.0,
            "status": "completed",
        }
        (run / "samples" / f"{step:08d}.jsonl").write_text(json.dumps(sample) + "\n")
    assert main(["report", str(run)]) == 0
    html = (run / "report.html").read_text()
    assert "of step 0" in html and "Step 1: the greatest" in html


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
    titles = re.findall(r"<figcaption>([^<]*)<", html) + re.findall(r"<tr><td>([^<]*)</td>", flat_part(html))
    assert {"failed gradings", "rollout/&lt;own&gt;", "eval/a/mine", "my group/x"} <= set(titles)
    assert {"parts of the reward", "a: parts of the reward", "a: pass@k, majority@n"} <= set(titles)
    for word in (
        "pass@2 0.6",
        "majority@2 0.4",
        "a 0.500 -&gt; 0.750",
        "failed and trained nothing",
    ):
        assert word in html, word


def test_node_hours_of_a_run(run: Path) -> None:
    assert main(["report", str(run)]) == 0
    html = (run / "report.html").read_text()
    rows = re.findall(r'<tr><td>(\w+)</td><td class="n">([\d.]+)</td><td class="n">([\d.]+ %)</td></tr>', html)
    hours = {name: float(value) for name, value, _ in rows}
    assert hours["training"] == pytest.approx(0.09) and rows[-1][0::2] == ("total", "100.0 %")
    assert sum(hours.values()) == pytest.approx(2 * hours["total"], rel=1e-3)


def test_a_trace_goes_where_it_is_wanted(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--trace", "-o", str(tmp_path / "t.json")]) == 0
    names = {event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert {"process_name", TRAIN, WAIT, STEP, GENERATE, READY} <= names
    capsys.readouterr()
    assert main(["report", str(run), "--trace", "-o", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["traceEvents"]


@pytest.mark.parametrize("words", [["report"], ["report", "--trace"]])
def test_what_is_not_there_is_said(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = make(tmp_path / "old")
    assert main([*words, str(old)]) == (0 if words == ["report"] else 2)
    assert words == ["report"] or "has no timeline" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "none")]) == 2
    assert main([*words, str(old), "-o", str(tmp_path / "no" / "where")]) == 2
    assert main([*words, "--trace", str(old), str(make(tmp_path / "other"))]) == 2
