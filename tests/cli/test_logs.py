"""One view of many logs: who said it, the last lines, what comes, and nothing that a terminal obeys."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from hpcrl.cli.logs import clean
from hpcrl.cli.main import main
from tests.support.rundirs import begin, make, put


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with two stages, whose second had two attempts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("PATH", str(tmp_path))
    root = make(tmp_path / "runs/a", ("sft", "grpo"), phase="running", time=time.time(), host="head")
    for stage, attempt in (("sft", 0), ("grpo", 0), ("grpo", 1)):
        begin(root / stage, attempt)
        for role in ("rollout-0", "engine-0", "trainer-2", "trainer-0", "host"):
            write(
                root / stage / f"logs/attempt-{attempt}/{role}.log",
                f"{stage} {attempt} {role} 1",
                f"{stage} {attempt} {role} 2",
            )
    write(root / "logs/job-12.out", "the job's own")
    return root


def write(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def test_the_last_attempt_with_who_and_where(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "a", "--lines", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "job-12@head     | the job's own",
        "trainer-0@node1 | grpo 1 trainer-0 2",
        "trainer-2@node2 | grpo 1 trainer-2 2",
        "engine-0@node3  | grpo 1 engine-0 2",
        "rollout-0@node3 | grpo 1 rollout-0 2",
        "host@head       | grpo 1 host 2",
    ]


def test_the_parts_of_an_engine_over_hosts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = run / "grpo"
    plan = json.loads((here / "attempts/1/plan.json").read_text())
    plan["engines"][0]["also"] = [plan["engines"][0] | {"host": "node4"}]
    (here / "attempts/1/plan.json").write_text(json.dumps(plan))
    write(here / "logs/attempt-1/engine-0-node-1.log", "the other part")
    assert main(["logs", "a", "--lines", "1", "--role", "engine"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "engine-0@node3        | grpo 1 engine-0 2",
        "engine-0-node-1@node4 | the other part",
    ]


@pytest.mark.parametrize(
    ("argv", "labels"),
    [
        (["--role", "engine"], {"engine-0@node3"}),
        (["--host", "node3"], {"engine-0@node3", "rollout-0@node3"}),
        (["--role", "trainer", "--host", "node2"], {"trainer-2@node2"}),
        (["--role", "job"], {"job-12@head", "host@head"}),
        (["--role", "rollout", "--host", "node1"], set()),
        (["--lines", "0"], set()),
    ],
)
def test_what_is_chosen(run: Path, capsys: pytest.CaptureFixture[str], argv: list[str], labels: set[str]) -> None:
    assert main(["logs", "a", *argv]) == 0
    assert {text.split(" ")[0] for text in capsys.readouterr().out.splitlines()} == labels


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--role", "rank"], "rollout, sandbox, job"),
        (["--host", "node9"], "there are head, node1, node2, node3"),
        (["--lines", "-1"], "--lines -1 is negative"),
        (["--lines", "x"], "invalid int value"),
    ],
)
def test_wrong_usage(run: Path, capsys: pytest.CaptureFixture[str], argv: list[str], error: str) -> None:
    assert main(["logs", "a", *argv]) == 2
    assert error in capsys.readouterr().err


def test_only_the_newest_output_of_the_job_is_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import os

    os.utime(run / "logs/job-12.out", (1, 1))
    write(run / "logs/job-13.out", "the new job's")
    assert main(["logs", "a", "--role", "job", "--lines", "1"]) == 0
    assert "the job's own" not in (out := capsys.readouterr().out) and "the new job's" in out


def test_silent_run_and_damaged_plan(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without logs, and one with a damaged plan."""
    make(run.parent / "b")
    assert main(["logs", "b"]) == 0
    assert "nothing has been logged" in capsys.readouterr().err
    (run / "grpo/attempts/1/plan.json").write_text('{"trainers": 3, "engines": [null]}')
    assert main(["logs", "a", "--role", "engine"]) == 0
    assert capsys.readouterr().out.startswith("engine-0 | ")


def test_a_terminal_is_safe() -> None:
    assert clean(b"\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2J end") == "red ]0;title end"
    assert clean(b" 10%|#  \r 20%|## \r") == " 20%|## ", "what a bar shows in the end"


def test_follow_across_attempts(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Following continues across attempts until the run ends."""
    from hpcrl.cli import logs

    monkeypatch.setattr(logs, "GLANCE", 0.01)
    monkeypatch.setattr(logs, "EVERY", 0.01)
    monkeypatch.setattr(logs, "SETTLE", 0.3)

    def live() -> None:
        time.sleep(1.0)
        write(run / "grpo/logs/attempt-1/engine-0.log", "last words")
        with (run / "grpo/logs/attempt-1/engine-0.log").open("a") as file:
            file.write("half a li")
            file.flush()
            time.sleep(0.1)
            file.write("ne\n")
        begin(run / "grpo", 2)
        write(run / "grpo/logs/attempt-2/engine-0.log", "born again")
        write(run / "grpo/logs/attempt-2/trainer-0.log", "not asked for")
        put(run / "state.json", {"phase": "finished", "time": time.time(), "stage": "grpo"})

    thread = threading.Thread(target=live)
    thread.start()
    assert main(["logs", "a", "-f", "--role", "engine", "--lines", "1"]) == 0
    thread.join(60)
    out, err = capsys.readouterr()
    assert [text.split(" | ")[1] for text in out.splitlines()] == [
        "grpo 1 engine-0 2",
        "last words",
        "half a line",
        "born again",
    ]
    assert "run has ended: finished" in err
