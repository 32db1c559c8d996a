"""Where a run is started, and the directory of one."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory where the run is started, the first in which modules are looked for."""
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return place


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run directory."""
    place = tmp_path / "run"
    place.mkdir()
    return place
