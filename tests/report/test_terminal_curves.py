"""Curves below the page of `hpcrl watch`: what they show, where they fit, and where there are none."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len

from hpcrl.commands.find_run import Jobs, look_at_run
from hpcrl.report.run_files import Run
from hpcrl.report.terminal import LivePage
from hpcrl.report.terminal_curves import Canvas, DrawnRows, has_utf8, pictures
from tests.support.rundirs import HERE, begin, log, make, steps
from tests.support.screens import run_on_terminal, screen

REPO = Path(__file__).parents[2]
EVIL = "a\x1b[2Jb"


def rising(count: int, first: int = 0) -> list[dict]:
    """Steps whose reward rises from 0 to 1 in 20 steps; all else but the seconds stays the same."""
    more = [{"rollout/reward": (first + i) / 20, "perf/step_time": 1.0 + (first + i) % 3} for i in range(count)]
    return [row | extra for row, extra in zip(steps(count, first, until=time.time()), more, strict=True)]


def trained(root: Path, *rows: dict) -> Path:
    make(root, phase="finished", time=time.time(), host="elsewhere")
    begin(root, total=20)
    log(root, *rows)
    return root


def shown(root: Path, monkeypatch: pytest.MonkeyPatch, columns: int, rows: int, encoding: str = "utf-8") -> str:
    """What one page of a run writes to a terminal of that size."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(rows))
    monkeypatch.setenv("TERM", "xterm-256color")
    data = io.BytesIO()
    stream = io.TextIOWrapper(data, encoding=encoding)
    run = Run(root)
    with LivePage(stream, root) as page:
        page.show(look_at_run(run, Jobs([run])))
    stream.flush()
    return data.getvalue().decode(encoding).replace("\n", "\r\n")


def test_a_line_goes_through_its_points() -> None:
    """In braille two by four dots a cell, in ASCII one by two; lower values are lower."""
    rise = [(list(range(n)), list(range(n - 1, -1, -1))) for n in (8, 4)]
    drawn = []
    for ascii_only, (x, y) in zip((False, True), rise, strict=True):
        canvas = Canvas(4, 2, ascii_only)
        canvas.draw(x, y, 0)
        drawn.append([line.plain for line in canvas.lines()])
    assert drawn == [["  ⡠⠊", "⡠⠊  "], ["  .'", ".'  "]]


def test_steps_that_come_again_are_drawn_once(tmp_path: Path) -> None:
    """A resumed run logs steps again; the evaluation of an earlier step, logged later, forgets none."""
    file = tmp_path / "metrics.jsonl"
    rows = DrawnRows(file)
    assert rows.read() == []
    log(tmp_path, *rising(4), {"rollout_id": 1, "eval/a/accuracy": 0.5, "other": 1.0})
    assert [row["rollout_id"] for row in rows.read()] == [0, 1, 2, 3]
    assert rows.read()[1]["eval/a/accuracy"] == 0.5 and "other" not in rows.read()[1]
    log(tmp_path, {"rollout_id": -1, "eval/a/accuracy": 0.4})
    assert [row["rollout_id"] for row in rows.read()] == [-1, 0, 1, 2, 3], "an evaluation that came late"
    log(tmp_path, rising(1, first=1)[0] | {"rollout/reward": 0.9})
    assert [row.get("rollout/reward") for row in rows.read()] == [None, 0.0, 0.9]
    file.write_text("")
    log(tmp_path, *rising(1))
    assert len(rows.read()) == 1


@pytest.mark.parametrize(("columns", "height"), [(36, 6), (79, 13), (80, 40), (200, 60), (35, 60), (80, 5)])
def test_pictures_fit(columns: int, height: int) -> None:
    """Whatever the size, no line is longer and there are not more of them than there is room for."""
    rows = [row | {"eval/" + EVIL * 9 + "/accuracy": row["rollout/reward"]} for row in rising(20)]
    for ascii_only in (False, True):
        lines = [line.plain for line in pictures(rows, columns, height, ascii_only)]
        assert bool(lines) == (columns >= 36 and height >= 6)
        assert len(lines) <= height and all(cell_len(line) <= columns and line.isprintable() for line in lines)
        assert not ascii_only or all(line.isascii() for line in lines)


def test_the_page_has_the_curves_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward and seconds, which change; staleness and speed stay the same.  None in a terminal too small, or of one
    step."""
    root = trained(tmp_path / "a", *rising(20))
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = shown(root, monkeypatch, 80, 40)
    lines = screen(text, 80)
    assert "reward  0.95" in " ".join(lines) and any("┤" in line and "⠁" < line[-1] < "⣿" for line in lines), lines
    assert "seconds per step" in text and "\x1b[36m" in text
    assert len(lines) < 40
    for columns, rows in ((30, 40), (80, 12)):
        assert "┤" not in shown(root, monkeypatch, columns, rows)
    one = trained(tmp_path / "b", *rising(1))
    assert "┤" not in shown(one, monkeypatch, 80, 40)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[36m" not in shown(root, monkeypatch, 80, 40)


def test_a_terminal_without_utf8_gets_ascii(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the locale's name or the stream's encoding; what an encoding lacks elsewhere on the page ends nothing."""
    root = trained(tmp_path / "a", *rising(20))
    make(root, phase="failed", time=time.time(), message="é → out of memory")
    monkeypatch.setenv("LC_ALL", "C")
    assert "+" in (text := shown(root, monkeypatch, 80, 40)) and "┤" not in text
    monkeypatch.setenv("LC_ALL", "en_US.UTF-8")
    assert "┤" in shown(root, monkeypatch, 80, 40)
    latin = shown(root, monkeypatch, 80, 40, "iso8859-1")
    assert "+" in latin and "é ? out" in latin
    assert has_utf8("utf-8", {"LANG": "de_DE.utf8@euro"}) and has_utf8("utf-8", {})
    assert not has_utf8("utf-8", {"LANG": "C"}) and not has_utf8("iso8859-1", {"LANG": "C.UTF-8"})


SCRIPT = """
import sys, time
from pathlib import Path
from hpcrl.cli import main
from hpcrl.commands import status as module
from tests.report.test_terminal_curves import rising
from tests.support.rundirs import HERE, log, put
root = Path("runs/a")
turns = iter([10, 10, 0])
def sleep(_):
    count = next(turns)
    if count:
        log(root, *rising(count, first=sum(1 for _ in open(root / "metrics.jsonl"))))
    else:
        put(root / "state.json", {"phase": "finished", "time": time.time(), "host": HERE + "-else"})
module.time.sleep = sleep
sys.exit(main(["watch", "a"]))
"""


def test_curves_grow_as_steps_come(tmp_path: Path) -> None:
    """On a pseudo-terminal: redrawn in place with the steps, the last of them is left on the screen, once."""
    root = make(tmp_path / "runs/a", phase="running", time=time.time(), host=f"{HERE}-else")
    begin(root, total=21)
    log(root, *rising(1))
    env = {"XDG_STATE_HOME": str(tmp_path / "xdg"), "PYTHONPATH": str(REPO), "LC_ALL": "C.UTF-8"}
    status, text = run_on_terminal([sys.executable, "-c", SCRIPT], 80, tmp_path, env, rows=30)
    assert status == 0, text
    assert "11 steps" in text and "21 steps" in text
    lines = screen(text, 80)
    assert sum("21 steps" in line for line in lines) == 1 and not any("11 steps" in line for line in lines), lines
    assert sum(line.startswith("reward  1") for line in lines) == 1, lines
    dumb = run_on_terminal(
        [sys.executable, "-m", "hpcrl", "watch", "a"], 80, tmp_path, {**env, "TERM": "dumb"}, rows=30
    )[1]
    assert "\x1b" not in dumb and "┤" not in dumb and dumb.count("\n") == 1, dumb
