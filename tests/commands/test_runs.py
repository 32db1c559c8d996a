"""Runs that never trained are listed and, on --yes, removed; all others stay."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpcrl.cli import main
from tests.support.rundirs import NOW, log, make, steps


def test_only_ended_untrained_runs_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only runs that never trained and have ended are removed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    make(tmp_path / "runs/typo", phase="failed", message="no such file")
    make(tmp_path / "runs/begins", phase="starting")
    trained = make(tmp_path / "runs/trained", phase="failed", message="boom")
    log(trained, *steps(2))
    saved = make(tmp_path / "runs/saved", phase="cancelled")
    (saved / "checkpoints").mkdir()
    (saved / "checkpoints/latest_checkpointed_iteration.txt").write_text("1")
    monkeypatch.setattr(time, "time", lambda: NOW)
    assert main(["runs"]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        f"runs/{name}" for name in ("begins", "saved", "trained", "typo")
    ]
    assert main(["runs", "--clean"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "runs/typo" and (tmp_path / "runs/typo").exists()
    assert main(["runs", "--yes"]) == 2
    assert main(["runs", "--clean", "--yes"]) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["begins", "saved", "trained"]
