"""What is drawn on a real terminal: nothing that matters is cut, and nothing of a run directory is obeyed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.support.rundirs import HERE, begin, log, make, put, steps
from tests.support.screens import run_on_terminal, screen

REPO = Path(__file__).parents[2]
HPCRL = [sys.executable, "-m", "hpcrl"]
EVIL = "[bold]x[/] \x1b[2J\x1b]0;title\x07\x9b1m:smile: [link=http://x]y"
SHOWN = "[bold]x[/] ]0;title"  # and what follows


def show(argv: list[str], columns: int, home: Path) -> tuple[int, list[str]]:
    status, text = run_on_terminal(argv, columns, home, {"XDG_STATE_HOME": str(home / "xdg"), "PYTHONPATH": str(REPO)})
    return status, screen(text, columns)


def working(root: Path) -> Path:
    """A run at step 3 of 40, with an accuracy."""
    make(root, phase="running", time=time.time(), host="elsewhere", ends=time.time() + 3600)
    begin(root, total=40)
    log(root, *steps(3, until=time.time()), {"rollout_id": 2, "time": time.time(), "eval/gsm8k/accuracy": 0.52})
    return root


@pytest.mark.parametrize("columns", [160, 80, 60])
def test_the_table_keeps_what_matters_on_any_terminal(tmp_path: Path, columns: int) -> None:
    working(tmp_path / "runs/[bold]qwen3-4b-gsm8k")
    make(tmp_path / "runs/old", phase="failed", message="engine-0: out of memory " * 9)
    status, lines = show([*HPCRL, "status"], columns, tmp_path)
    lines = [line for line in lines if not line.startswith("hpcrl: note")]
    assert status == 0 and len(lines) == 4, lines
    assert lines[1].split()[:2] == ["runs/[bold]qwen3-4b-gsm8k", "running"] and "3/40" in lines[1].split(), lines
    assert lines[2].startswith("runs/old") and "engine-0: out" in lines[2] and lines[2].endswith("…")
    assert ("STALE" in lines[0], "REWARD" in lines[0]) == (columns > 100, columns > 60)


def test_a_long_name_goes_on_in_the_next_line(tmp_path: Path) -> None:
    name = "a-run-with-a-name-that-takes-more-than-half-of-the-line-2026-11-21"
    working(tmp_path / "runs" / name)
    _, lines = show([*HPCRL, "status"], 60, tmp_path)
    assert "".join(line.split()[0] for line in lines[1:3]) == f"runs/{name}", lines


@pytest.mark.parametrize("command", [["status"], ["status", "a"], ["watch", "a"]])
def test_nothing_that_a_run_says_is_obeyed(tmp_path: Path, command: list[str]) -> None:
    root = make(tmp_path / "runs/a", phase="failed")
    put(root / "state.json", {"phase": "failed", "time": 1.0, "host": EVIL, "message": EVIL, "stage": ""})
    _, lines = show([*HPCRL, *command], 120, tmp_path)  # which fails for anything but colours and redrawing
    assert any(SHOWN in line and ":smile: [link=http://x]y" in line for line in lines), lines


@pytest.mark.parametrize("rows", [24, 5])
def test_watch_redraws_the_whole_page(tmp_path: Path, rows: int) -> None:
    """`watch` redraws in place and leaves the whole page."""
    root = working(tmp_path / "runs/a")
    script = (
        "import sys; from hpcrl.cli import status as module; from hpcrl.cli.main import main\nfrom "
        "tests.support.rundirs import put; from pathlib import Path; import time\nturns = iter(['running', 'saving', "
        f"'finished'])\nmodule.time.sleep = lambda _: put(Path({str(root)!r}) / 'state.json', {{'phase': next(turns), "
        f"'time': time.time(), 'host': {HERE!r} + '-else'}})\nsys.exit(main(['watch', 'a']))"
    )
    env = {"XDG_STATE_HOME": str(tmp_path / "xdg"), "PYTHONPATH": str(REPO)}
    status, text = run_on_terminal([sys.executable, "-c", script], 80, tmp_path, env, rows=rows)
    lines = screen(text, 80)
    assert status == 0 and text.endswith("\x1b[?25h"), "the cursor is shown again"
    assert [line for line in lines if line.startswith("runs/a: ")] == ["runs/a: finished"], lines
    assert any("gsm8k 0.520 after 3 steps" in line for line in lines)
    assert text.count("runs/a: ") >= 4


BAR = """
import json, sys, time
from pathlib import Path
from hpcrl.report import progress
from hpcrl.run.peers import TrainerPeer, publish
from hpcrl.run.rundir import RunDir
progress.GLANCE = 0.0
rundir = RunDir.create(Path("run"))
rundir.make_attempt()
bar = progress.Progress(rundir, "grpo [red]", None)
bar.poll()
publish(rundir, TrainerPeer(start=3, total=40))
bar.poll()
print("hpcrl: a note of the [red]launcher", file=sys.stderr, flush=True)
step = {"rollout/reward": 0.5, "train/loss": 0.0, "staleness/max": 0.0, "rollout/response_len/mean": 812.4, "perf/tokens_per_sec": 10234.0}
for row in [step | {"rollout_id": 3}, step | {"rollout_id": 4}, {"rollout_id": 4, "eval/[gsm8k]\\x1b[2J/accuracy": 0.52}]:
    with rundir.metrics_file.open("a") as file:
        file.write(json.dumps(row) + "\\n")
    bar.poll()
    print("to stdout", flush=True)
bar.close()
"""


@pytest.mark.parametrize("columns", [100, 80, 44])
def test_bar_stays_below_the_output(tmp_path: Path, columns: int) -> None:
    """A bar shows every number and stays below what is printed."""
    status, lines = show([sys.executable, "-c", BAR], columns, tmp_path)
    assert status == 0, lines
    assert lines[:4] == ["hpcrl: a note of the [red]launcher"] + ["to stdout"] * 3, lines
    assert lines[4].startswith("grpo [red] ") and " 5/40 " in lines[4]
    numbers = " ".join(" ".join(lines[5:]).split())
    assert numbers == "reward 0.500, length 812.4, staleness 0, 10234 tok/s, [gsm8k] accuracy 0.52"


@pytest.mark.parametrize(("size", "count"), [(False, "3/3"), (True, "3.0/3.0 GB")])
def test_conversions_have_a_bar(tmp_path: Path, size: bool, count: str) -> None:
    script = (
        f"from hpcrl.report.progress import Meter\nwith Meter('to FP8', {3 * 10**9 if size else 3}, 'files', "
        f"size={size}) as meter:\n    for _ in range(3): meter.add({10**9 if size else 1})"
    )
    _, lines = show([sys.executable, "-c", script], 80, tmp_path)
    assert lines[0].startswith("to FP8 ") and count in lines[0] and lines[1:] == [""], lines


def test_a_terminal_that_cannot_be_drawn_on_gets_lines(tmp_path: Path) -> None:
    make(tmp_path / "runs/a", phase="finished")
    env = {"XDG_STATE_HOME": str(tmp_path / "xdg"), "PYTHONPATH": str(REPO), "TERM": "dumb"}
    for command in (["status"], ["watch", "a"]):
        assert "\x1b" not in run_on_terminal([*HPCRL, *command], 80, tmp_path, os.environ | env)[1]


def test_conversions_write_lines_elsewhere(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcrl.report import progress

    assert list(progress.track(iter("abc"), 3, "to FP8", "files")) == ["a", "b", "c"]
    assert capfd.readouterr().err == "to FP8: 3 of 3 files  [00:00]\n"
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with progress.Meter("to Hugging Face", 2_000_000, "B", size=True) as meter:
        meter.add(1_000_000)
    assert capfd.readouterr().err.splitlines() == ["to Hugging Face: 1 of 2 MB  [00:00]"] * 2
