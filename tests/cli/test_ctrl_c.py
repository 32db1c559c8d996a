"""Ctrl-C at a terminal, where SIGINT goes to every process of the foreground group: once it ends in order, twice at
once; and nothing is left either time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.support.rundirs import begin, log, make, steps
from tests.support.runs import REPO, all_gone, sft
from tests.support.screens import ctrl_c

pytestmark = pytest.mark.process
HPCRL = [sys.executable, "-m", "hpcrl"]


def press(words: list[str], when: list[str], cwd: Path) -> tuple[int, str]:
    env = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(cwd / "xdg")}
    return ctrl_c([*HPCRL, *words], when, cwd, env)


def test_ctrl_c_once_and_twice_in_a_run(tmp_path: Path, task: Path) -> None:
    """Before anything is trained: once 143, with what to do next, twice 130.  In training: the second one ends at once,
    with no picture and no wait for hosts.  No traceback, and no process of the run stays."""
    sft(tmp_path, task, num_rollout=100000, save_interval=None, actor_num_nodes=1)
    root = tmp_path / "runs" / "a"
    cases = [
        (["run", "recipe.toml", "--run-dir", "runs/a"], ["run directory"], 143, "stopped while starting", ": nothing"),
        (["resume", "runs/a"], ["(starting)", "stopping"], 130, "stopped while starting", ": nothing"),
        (["resume", "runs/a"], ["tok/s", "stopping"], 130, "ended without saving", ": ends after"),
    ]
    for words, when, status, said, saves in cases:
        found, text = press(words, when, tmp_path)
        assert found == status and "Traceback" not in text, text
        assert text.count("hpcrl: stopping: ") == text.count(f"hpcrl: stopping{saves}") == 1 and said in text, text
        assert "hpcrl resume" in text.splitlines()[-1], text
        assert all_gone(root, []), text
    assert not (root / "curves.svg").exists(), "who presses twice does not wait for it"


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_only_ends_the_look(tmp_path: Path, presses: int) -> None:
    """`hpcrl watch` says that the run itself continues, and ends with 130."""
    begin(make(tmp_path / "a", phase="running", time=time.time() + 40, host="elsewhere"))
    log(tmp_path / "a", *steps(3))
    status, text = press(["watch", "a"], ["3 of 10"] * presses, tmp_path)
    assert status in ((130,) if presses == 1 else (130, -2)) and "Traceback" not in text, text
    assert presses == 2 or "hpcrl stop a" in text.splitlines()[-1], text
