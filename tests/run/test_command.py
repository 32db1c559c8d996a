"""A short command is asked: whatever it does is an answer, in time, and nothing of it stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpcrl.run.process import LATE, MISSING, CommandResult, run_command
from tests.support.runs import gone


@pytest.mark.parametrize(
    ("script", "answer", "said"),
    [
        ("echo a; echo b", CommandResult(0, "a\nb\n", "", "sh"), "b"),
        ("echo a; echo b >&2; exit 3", CommandResult(3, "a\n", "b\n", "sh"), "b"),
        (
            "echo sh: no such job >&2; echo >&2; exit 1",
            CommandResult(1, "", "sh: no such job\n\n", "sh"),
            "no such job",
        ),
        ("exit 5", CommandResult(5, "", "", "sh"), "exit code 5"),
        ("kill -9 $$", CommandResult(-9, "", "", "sh"), "exit code -9"),
        (r"printf '\377x'", CommandResult(0, "\ufffdx", "", "sh"), "\ufffdx"),
    ],
)
def test_what_it_answers(script: str, answer: CommandResult, said: str) -> None:
    found = run_command(["sh", "-c", script], 5)
    assert (found, found.last_output) == (answer, said)


def test_it_reads_what_it_is_given_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command(["cat"], 5, "a\nb").out == "a\nb"
    assert run_command(["cat"], 5).out == "", "the terminal is not its input"
    monkeypatch.setenv("OURS", "x")
    assert run_command(["sh", "-c", "echo $OURS"], 5).out == "x\n"
    assert run_command(["sh", "-c", "echo $OURS"], 5, env={"PATH": os.environ["PATH"]}).out == "\n"


@pytest.mark.parametrize("program", ["/nowhere/x", "no-such-program-anywhere", "/tmp"])
def test_a_program_that_is_missing_is_an_answer(program: str) -> None:
    answer = run_command([program, "--version"], 5)
    assert answer.code == MISSING and answer.last_output.startswith("cannot be started: ")


def test_late_command_is_ended(tmp_path: Path) -> None:
    """Its child holds the pipe open, as a hanging file system's client would."""
    began = time.monotonic()
    file = tmp_path / "pid"
    answer = run_command(["sh", "-c", f"sleep 60 & echo $! > {file}; sleep 60"], 3)
    assert (answer.code, answer.out, answer.last_output) == (LATE, "", "no answer within 3 s")
    assert time.monotonic() - began < 20
    assert gone([int(file.read_text())]), "its child still runs"
