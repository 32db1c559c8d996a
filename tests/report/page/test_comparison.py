"""Several runs on one page: what differs, curves over each other, the same prompts side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.report.page.charts import hue
from hpcrl.report.page.comparison import MOST
from tests.report.page.conftest import EVIL
from tests.support.rundirs import log, make, put, steps


def one_run(root: Path, lr: float, rewards: list[float], answer: str) -> Path:
    """A finished run with one held-out set."""
    run = make(root, phase="finished")
    put(run / "options.json", {"num_rollout": 3, "lr": lr, "save": f"{run}/checkpoints", "run_dir": str(run)})
    for number, reward in enumerate(rewards):
        log(run, *steps(1, first=number, **{"rollout/reward": reward, "rollout/constant": 2.0}))
    mean = {"accuracy": lr * 1e5, "right_or_wrong": 0.0, "ci_low": 0.1, "ci_high": 0.3}
    log(run, {"rollout_id": 2} | {f"eval/aime/{name}": value for name, value in mean.items()})
    (run / "samples").mkdir()
    rows = [
        {"group": g, "index": 0, "prompt": f"q{g}", "label": "7", "response": answer, "reward": 1.0 * (g == 1) * lr}
        for g in range(3)
    ]
    (run / "samples" / "eval-aime-2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        one_run(tmp_path / "x" / "a", 1e-6, [0.1, 0.2, 0.3], "of a"),
        one_run(tmp_path / "y" / "a", 2e-6, [0.1, 0.4, 0.8], EVIL),
    ]


def compared(runs: list[Path], tmp_path: Path) -> str:
    target = tmp_path / "page.html"
    assert main(["report", *map(str, runs), "-o", str(target)]) == 0
    return target.read_text()


def row(html: str, name: str) -> list[str]:
    """The cells of a row of a table."""
    found = re.search(rf"<tr><th>{re.escape(name)}</th>(.*?)</tr>", html)
    assert found, name
    return re.findall(r"<td>(.*?)</td>", found[1])


def test_what_differs_is_in_rows(runs: list[Path], tmp_path: Path) -> None:
    """Options that differ and no others; a run's own directory is no difference."""
    html = compared(runs, tmp_path)
    assert row(html, "lr") == ["1e-06", "2e-06"]
    assert "<th>save</th>" not in html and "<th>num_rollout</th>" not in html and "<th>run_dir</th>" not in html
    assert row(html, "aime, last") == ["0.100 (0.100 to 0.300)", "0.200 (0.100 to 0.300)"]
    assert ">x/a<" in html and ">y/a<" in html, "names that tell them apart"


def test_curves_are_laid_over_each_other(runs: list[Path], tmp_path: Path) -> None:
    html = compared(runs, tmp_path)
    charts = dict(re.findall(r"<figure class=\"chart\"><figcaption>([^<]*)</figcaption>(.*?)</figure>", html))
    assert re.findall(r'<polyline [^>]*class="([^"]+)"', charts["reward"]) == [hue(0), hue(1)]
    last = re.findall(r"<tspan[^>]*>([^<]+)</tspan>", charts["reward"])[-3:]
    assert last == ["step 3", "x/a 0.3", "y/a 0.8"]
    assert row(html, "rollout/constant") == ["2", "2"] and "rollout/constant" not in charts


def test_the_same_prompts_are_side_by_side(runs: list[Path], tmp_path: Path) -> None:
    """Where rewards differ most comes first; what a model wrote is text."""
    html = compared(runs, tmp_path).partition("the same prompts")[2]
    assert re.findall(r"<summary[^>]*><span>(q\d)</span>", html)[0] == "q1"
    assert "of a" in html and "<script" not in html and "&lt;script&gt;" in html
    other = one_run(tmp_path / "z", 3e-6, [0.2], "later")
    (other / "samples" / "eval-aime-2.jsonl").unlink()
    assert "of a" in compared([*runs, other], tmp_path), "a run without samples does not hide the others"


def test_runs_with_stages_of_their_own(runs: list[Path], tmp_path: Path) -> None:
    """A run of one stage is compared with the last stage of one that has several."""
    staged = make(tmp_path / "staged", ("sft", "grpo"), phase="finished")
    log(staged / "sft", *steps(2, **{"train/loss": 0.3}))
    for number in range(3):
        log(staged / "grpo", *steps(1, first=number, **{"rollout/reward": 0.1 * number}))
    html = compared([runs[0], staged], tmp_path)
    assert "Stage sft" in html
    reward = html.partition("Stage grpo")[2].partition("<figcaption>reward</figcaption>")[2].partition("</figure>")[0]
    assert re.findall(r'<polyline [^>]*class="([^"]+)"', reward) == [hue(0), hue(1)]


def test_a_run_named_twice_and_too_many(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs[0]), f"{runs[0]}/"]) == 2
    assert "are the same run" in capsys.readouterr().err
    many = [make(tmp_path / f"r{n}") for n in range(MOST + 1)]
    assert main(["report", *map(str, many)]) == 2
    assert f"{MOST + 1} runs" in capsys.readouterr().err
