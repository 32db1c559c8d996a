"""What an engine's processes tell of their start comes to its supervisor's timeline, and does no harm where it cannot."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrl.engine import start_phases
from hpcrl.report.timeline.reading import read_tracks
from hpcrl.report.timeline.spans import CONFIGURE, IMPORT, LOAD, PROFILE, WARM_UP, Timeline


def made(rank: int) -> SimpleNamespace:
    """A worker."""
    return SimpleNamespace(
        rank=rank, load_model=lambda **_: "loaded", determine_available_memory=lambda: 7, compile_or_warm_up_model=abs
    )


def test_phases_of_a_worker_reach_the_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker's methods are told of with what they return unchanged, the other's are not; between the imports
    and the worker the server configures itself."""
    path = tmp_path / "phases"
    monkeypatch.setenv(start_phases.FILE, str(path))
    start_phases.imported()
    for rank in (0, 1):
        worker = made(rank)
        start_phases.watch(worker)
        assert worker.load_model(load_dummy_weights=False) == "loaded" and worker.determine_available_memory() == 7
        assert worker.compile_or_warm_up_model(-3) == 3
    path.write_bytes(path.read_bytes() + b'["step",1,2]\n["torn",\n\xff\n')
    timeline = Timeline(tmp_path / "t.jsonl", "engine", 0, "a")
    start_phases.record(path, timeline)
    [track] = read_tracks(tmp_path / "t.jsonl", 0)
    assert [span.name for span in track.spans] == [IMPORT, CONFIGURE, LOAD, PROFILE, WARM_UP]
    assert all(span.begin <= span.end for span in track.spans)


def test_an_engine_starts_without_a_place_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, a directory that is not there, no variable at all: the worker does what it did."""
    monkeypatch.delenv(start_phases.FILE, raising=False)
    start_phases.imported()
    monkeypatch.setenv(start_phases.FILE, str(tmp_path / "none" / "phases"))
    worker = made(0)
    start_phases.watch(worker)
    assert worker.load_model() == "loaded"
    start_phases.record(tmp_path / "none", Timeline(None))
