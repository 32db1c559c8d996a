"""`hpcrl report --to` as the page prints it, by real processes: to each tracker, twice at once, and after a kill.

A package that is installed is sent to as it is, on this machine; of one that is not a stand-in writes down every call,
and then waits until the test lets it continue.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrl.config.options import Options
from hpcrl.errors import DeadlineError
from hpcrl.report.trackers.live import sending_live, trackers_of
from hpcrl.report.trackers.record import LOCK, SENT, TRACKERS, sending
from tests.documents.texts import REPO, printed
from tests.support.children import read_line
from tests.support.queues import until
from tests.support.rundirs import begin, log, make, put, steps
from tests.support.stand_in_trackers import stand_ins

pytestmark = pytest.mark.process

COUNT = 5  #: records of the run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = make(tmp_path / "run")
    begin(root)
    log(root, *steps(COUNT))
    put(root / "samples" / "00000001.jsonl", {"prompt": "1+1=", "response": "2", "label": "2", "reward": 1.0})
    return root


class Typing:
    """`hpcrl report RUN --to NAME`, typed in a directory of the test's."""

    def __init__(self, folder: Path, run: Path, tracker: str, real: bool) -> None:
        (line,) = {command.line for command in printed() if command.line == f"hpcrl report RUN --to {tracker}"}
        self.line = line.replace("RUN", str(run))
        self.folder = folder
        self.place = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "CALLS": str(folder)}
        self.place |= {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder)}
        self.place |= {
            "MLFLOW_TRACKING_URI": f"file:{folder}/mlflow",
            "MLFLOW_ALLOW_FILE_STORE": "true",
            "PYTHONPATH": f"{REPO}:{os.environ.get('PYTHONPATH', '')}",
        }
        if not real:
            self.place |= stand_ins(folder, tracker, "pandas", waits=True)

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", f"exec {self.line}"], cwd=self.folder, env=self.place, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def calls(self) -> list[str]:
        """What the stand-in was called with."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def logged(self) -> list[str]:
        """Its calls with the metrics of a step."""
        return [line for line in self.calls() if line.startswith(("log (", "log_metrics (")) and "train/loss" in line]


def ends(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return said


@pytest.mark.parametrize("tracker", TRACKERS.names())
def test_two_at_once_send_once(tracker: str, run: Path, tmp_path: Path) -> None:
    """The second says who sends, waits for it, and finds nothing that is new; a third that cannot wait names the first
    in its error."""
    typing = Typing(tmp_path, run, tracker, real=False)
    first = typing.start()
    try:
        until(lambda: len(typing.logged()) == 1, 60)
        second = typing.start()
        with pytest.raises(DeadlineError, match=f"process {first.pid} on .*nothing was sent"), sending(run, 0.3):
            pass
        assert (run / LOCK).stat().st_mode & 0o777 == 0o600
        said = read_line(second)  # type: ignore[union-attr]
        assert f"process {first.pid} on" in said and "30 s at most" in said
        (tmp_path / "continue").touch()
        assert f"{COUNT} records" in ends(first) and "nothing new in" in ends(second)
    finally:
        first.kill()
    assert len(typing.logged()) == COUNT


def test_a_killed_one_leaves_no_lock(run: Path, tmp_path: Path) -> None:
    """What it has not noted as sent is sent by the next, at once."""
    typing = Typing(tmp_path, run, "wandb", real=False)
    first = typing.start()
    try:
        until(lambda: len(typing.logged()) == 1, 60)
    finally:
        first.kill()
        first.communicate(timeout=60)
    assert not (run / SENT).exists() and str(first.pid) in (run / LOCK).read_text()
    (tmp_path / "continue").touch()
    said = ends(typing.start())
    assert f"{COUNT} records" in said and "waiting" not in said


def test_metrics_are_sent_as_they_come(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record once, the last when the run ends; W&B's mode comes from its option."""
    for name, value in stand_ins(tmp_path, "wandb", "pandas").items():
        monkeypatch.setenv(name, value)
    typing = Typing(tmp_path, run, "wandb", real=True)
    options = Options(use_wandb=True, wandb_mode="offline", report_to=["wandb"])
    with sending_live(options, run):
        until(lambda: len(typing.logged()) == COUNT, 60)
        log(run, {"rollout_id": COUNT, "time": 9e9, "train/loss": 1.0})
    assert len(typing.logged()) == COUNT + 1 and sum(line.startswith("finish") for line in typing.calls()) == 1
    assert sum("'samples'" in line for line in typing.calls()) == 1
    assert trackers_of(options) == ["wandb"] and not trackers_of(Options(use_wandb=True, wandb_mode="disabled"))


@pytest.mark.parametrize("tracker", TRACKERS.names())
def test_the_package_itself(tracker: str, run: Path, tmp_path: Path) -> None:
    """Of two processes at once one has it take every record, offline."""
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    typing = Typing(tmp_path, run, tracker, real=True)
    both = [typing.start(), typing.start()]
    said = [ends(process) for process in both]
    assert sorted("nothing new in" in text for text in said) == [False, True], said
    assert any(f"{COUNT} records" in text for text in said)
