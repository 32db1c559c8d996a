"""stop and cancel: the right run, the right process, and clear words where neither is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrl.cli.find_run import owner
from hpcrl.cli.main import main
from tests.support.able import needs
from tests.support.children import read_line
from tests.support.rundirs import HERE, FakeSlurm, begin, make, put, row

#: holds a run's lock as a launcher does; the first SIGTERM asks it to stop, the second ends it
LAUNCHER = """
import fcntl, os, signal, sys, time
count = 0
def note(*_):
    global count
    count += 1
signal.signal(signal.SIGTERM, note)
with open(sys.argv[1] + "/lock", "a+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    print("held", flush=True)
    end = time.time() + 30
    while count < int(sys.argv[2]) and time.time() < end:
        time.sleep(0.01)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that should be at work on this host."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    return make(tmp_path / "runs/a", phase="running", time=time.time(), host=HERE)


@pytest.fixture
def launcher(run: Path) -> Iterator[subprocess.Popen[str]]:
    yield from _start(run, 2)


@pytest.fixture
def old_launcher(run: Path) -> Iterator[subprocess.Popen[str]]:
    """One that ends on the first signal and writes no state."""
    (run / "state.json").unlink()
    begin(run)
    yield from _start(run, 1)


def _start(run: Path, signals: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", LAUNCHER, str(run), str(signals)], stdout=subprocess.PIPE, text=True
    )
    assert read_line(process) == "held\n"
    put(
        run / "state.json", {"phase": "running", "time": time.time(), "host": HERE, "pid": process.pid}
    ) if signals > 1 else None
    yield process
    process.kill()
    process.wait(60)


def test_the_owner_holds_the_lock(run: Path, launcher: subprocess.Popen[str]) -> None:
    assert owner(run).pid == launcher.pid
    launcher.kill()
    os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
    assert owner(run) is None, "a zombie holds nothing"
    for text in (str(os.getpid()), "", "x", "-1", "99999999999999999999", "0"):
        (run / "lock").write_text(text)
        assert owner(run) is None, "a process that does not hold the file is not the launcher"


def test_stop_asks_and_asks_once(
    run: Path, launcher: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", "a"]) == 0
    assert (run / "stop").exists() and launcher.poll() is None
    assert "asked runs/a to save and end" in capsys.readouterr().out
    assert main(["stop", "a"]) == 0
    assert "already stopping" in capsys.readouterr().out
    main(["status", "a"])
    assert "saving and ending" in capsys.readouterr().out


def test_stop_signals_an_old_launcher(run: Path, old_launcher: subprocess.Popen[str]) -> None:
    """`stop` signals a launcher that does not look for the stop file."""
    assert main(["stop", "a"]) == 0
    assert old_launcher.wait(60) == 0
    assert not (run / "stop").exists()


@pytest.mark.parametrize(
    ("phase", "error"),
    [
        ("finished", "nothing to stop"),
        ("requeued", "queue with hpcrl cancel runs/a"),
        ("running", "lost (its launcher on"),
    ],
)
def test_stop_of_what_does_not_run(run: Path, capsys: pytest.CaptureFixture[str], phase: str, error: str) -> None:
    put(run / "state.json", {"phase": phase, "time": time.time(), "host": HERE, "pid": 1})
    assert main(["stop", "a"]) == 1
    assert error in capsys.readouterr().err
    assert not (run / "stop").exists()


def test_cancel_ends_the_launcher_and_says_so(
    run: Path, launcher: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cancel", "a"]) == 0
    assert launcher.wait(60) == 0
    main(["status", "a"])
    assert "runs/a: cancelled" in capsys.readouterr().out


def test_cancel_leaves_other_processes_alone(
    run: Path, launcher: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    other = make(run.parent / "b", phase="running", time=time.time(), host=HERE)
    (other / "lock").write_text(str(launcher.pid))  # its number was given again, to a launcher of another run even
    assert main(["cancel", "b"]) == 1
    assert "nothing to cancel" in capsys.readouterr().err
    time.sleep(0.05)
    assert launcher.poll() is None


def test_cancel_of_a_run_on_another_host_names_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(run / "state.json", {"phase": "running", "time": time.time(), "host": "faraway", "pid": 1})
    (run / "lock").write_text("1")
    assert main(["cancel", "a"]) == 1
    err = capsys.readouterr().err
    assert "runs/a runs on faraway" in err and f"{HERE}; cancel it on faraway" in err


# ---- a directory that another user has made


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Commands of Slurm's that know jobs 7 and 8, of a run whose identity everybody can read."""
    slurm = FakeSlurm(tmp_path / "bin")
    rows = [row("7", comment="hpcrl:id-a"), row("8", "PENDING", comment="hpcrl:id-a"), row("9", comment="hpcrl:other")]
    slurm.command("squeue", "".join(rows))
    slurm.command("scancel")
    slurm.command("scontrol")
    monkeypatch.setenv("PATH", f"{slurm.bin}:{os.environ['PATH']}")
    return slurm


def job(run: Path, **fields: object) -> None:
    known = {"scheduler": "slurm", "job_id": "7", "submitted": time.time(), "identity": "id-a"}
    put(run / "job.json", known | fields)


@pytest.mark.parametrize(
    "forged",
    [
        {"job_id": "--user=vic"},
        {"job_id": "7 --user=vic"},
        {"job_id": "7\n8"},
        {"job_id": "-1"},
        {"chain": ["7", "--user=vic"]},
        {"chain": ["7", ""]},
        {"chain": ["7", "8,9"]},
        {"job_id": "7x"},
        {"job_id": "all"},
        {"scheduler": "../slurm"},
        {"identity": "id-a\x1b[2J"},
    ],
)
def test_forged_numbers_reach_no_command(
    run: Path, queue: FakeSlurm, capsys: pytest.CaptureFixture[str], forged: dict[str, object]
) -> None:
    """Neither cancel nor status hands a text of job.json to a command unless it is a number."""
    job(run, **forged)
    assert main(["cancel", str(run)])
    main(["status", str(run)])
    said = capsys.readouterr()
    assert not queue.calls("scancel") and "\x1b" not in said.err + said.out
    assert "Traceback" not in said.err
    for call in queue.calls("squeue"):
        assert "vic" not in call and "7x" not in call


def test_cancel_leaves_a_live_launcher_the_last_word(run: Path, queue: FakeSlurm) -> None:
    """A job that waited when it was cancelled, and has begun meanwhile."""
    job(run, job_id="8")
    state = make(run.parent / "other", phase="starting", time=time.time()) / "state.json"
    (run / "state.json").unlink()
    queue.command("scancel", before=f"cp {state} {run}/state.json")
    assert main(["cancel", str(run)]) == 0
    assert queue.calls("scancel") == ["8"]
    assert json.loads((run / "state.json").read_text())["phase"] == "starting"


def test_stop_of_a_job_whose_launcher_comes_up(run: Path, queue: FakeSlurm) -> None:
    """Slurm calls the job running, and its launcher has not written its first state yet."""
    job(run)
    (run / "state.json").unlink()
    assert main(["stop", str(run)]) == 0
    assert (run / "stop").exists()


def test_jobs_of_another_run_are_left_alone(run: Path, queue: FakeSlurm) -> None:
    """A chain may name any number: only those that carry this run's identity are cancelled."""
    job(run, chain=["7", "8", "9", "10"])
    assert main(["cancel", str(run)]) == 0
    assert queue.calls("scancel") == ["8", "7"]


@needs("root")
@pytest.mark.parametrize("whose", ["", "job.json"])
def test_a_directory_of_another_user_names_no_job(
    run: Path, queue: FakeSlurm, capsys: pytest.CaptureFixture[str], whose: str
) -> None:
    """Number and identity of one's own job are in everybody's squeue."""
    job(run)
    os.chown(run / whose, 12345, 12345)
    assert main(["cancel", str(run)]) == 1
    said = capsys.readouterr().err
    assert not queue.calls("scancel") and "belongs to user 12345" in said
    assert not (run / "cancel").exists()


@needs("root")
def test_a_directory_whose_owner_is_not_known(run: Path, queue: FakeSlurm) -> None:
    """NFS and containers show nobody's number in place of a user that they do not know."""
    job(run)
    os.chown(run, 65534, 65534)
    assert main(["cancel", str(run)]) == 0
    assert queue.calls("scancel")
