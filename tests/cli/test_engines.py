"""`hpcrl engines`: what it shows."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpcrl.cli.main import main
from hpcrl.run.engine_files import EngineView, write_views
from hpcrl.run.rundir import RunDir
from tests.support.rundirs import begin, make


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    root = make(tmp_path / "run", time=time.time())
    begin(root)
    views = [
        EngineView(index=0, host="a", state="serving", version=7, requests=3, restarts=0),
        EngineView(index=1, host="b", state="ended", version=None, requests=0, restarts=2, why="hangs\x1b[2J"),
        EngineView(index=2, host="b", state="gone", version=None, requests=0, restarts=0, why="killed"),
    ]
    rundir = RunDir(root, 0)
    write_views(rundir, 7, views)
    return rundir


def test_engines_are_listed(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", str(rundir.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ENGINE", "STATE", "HOST", "VERSION", "REQUESTS", "RESTARTS"]
    assert lines[1].split() == ["0", "serving", "a", "7", "3", "0"]
    assert lines[2].split() == ["1", "ended", "b", "-", "0", "2", "hangs"]
    assert main(["engines", str(rundir.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["published"] == 7
    assert main(["status", str(rundir.root)]) == 0
    assert "1 serving, 1 ended, 1 gone; 2 restarts" in capsys.readouterr().out


def test_a_run_that_has_reported_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", str(make(tmp_path / "run"))]) == 1
    assert "not reported any engines" in capsys.readouterr().err
