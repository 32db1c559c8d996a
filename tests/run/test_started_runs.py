"""The list of a user's runs: a convenience that fails nobody."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from hpcrl.cli.find_run import all_runs
from hpcrl.run import started_runs
from hpcrl.run.started_runs import known_runs, links_folder, remember
from tests.support.rundirs import make


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_what_is_remembered_is_known_once(home: Path) -> None:
    assert known_runs() == []
    roots = [make(home / "a/run"), make(home / "b/run")]
    for root in [*roots, *roots]:
        remember(root)
    assert known_runs() == sorted(roots)
    assert links_folder() == home / "state/hpcrl/runs"
    assert links_folder().stat().st_mode & 0o777 == 0o700


def test_removed_runs_are_dropped(home: Path) -> None:
    """Removed runs are dropped, but not those that may come back."""
    gone, away = make(home / "a/run"), make(home / "mount/x/run")
    remember(gone)
    remember(away)
    shutil.rmtree(gone)
    shutil.rmtree(home / "mount")
    assert known_runs() == []
    assert [link.readlink() for link in links_folder().iterdir()] == [away]
    make(away)
    assert known_runs() == [away]
    shutil.rmtree(home / "mount")
    old = time.time() - started_runs.FORGET - 1
    for link in links_folder().iterdir():
        os.utime(link, (old, old), follow_symlinks=False)
    assert known_runs() == [] and not list(links_folder().iterdir())


def test_unwritable_home_fails_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that is missing or cannot be written fails nothing."""
    (home / "state").write_text("a file")
    remember(home)
    assert known_runs() == []

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("XDG_STATE_HOME", "relative/paths/do/not/count")
    monkeypatch.setattr(started_runs.Path, "home", nowhere)
    remember(home)
    assert known_runs() == []


def test_strange_entries_are_no_runs(home: Path) -> None:
    links_folder().mkdir(parents=True)
    (links_folder() / "file").write_text("x")
    (links_folder() / "loop").symlink_to(links_folder() / "loop")
    assert known_runs() == []


def test_run_reached_by_two_paths(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is reached by two paths is listed once."""
    root = make(home / "real" / "runs" / "a")
    (home / "way").symlink_to(home / "real")
    remember(home / "way" / "runs" / "a")
    monkeypatch.chdir(home / "real")
    assert known_runs() == [home / "way/runs/a"] == all_runs() and all_runs()[0].samefile(root)
    remember(root)
    assert all_runs() == [root], "as it was said last"
