"""Plug-ins found by the names of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrl.utils.plugins import PluginFolder


@pytest.fixture
def room(tmp_path: Path) -> PluginFolder:
    (tmp_path / "exact.py").write_text('"""Exact matches.\n\nMore."""\nKEYS = ("a", "b")\nimport absent_package\n')
    (tmp_path / "maths.py").write_text("KEYS = made()\n")
    (tmp_path / "_shared.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    return PluginFolder(tmp_path)


def test_names_are_those_of_files(room: PluginFolder) -> None:
    assert room.names() == ("exact", "maths")
    assert "exact" in room and "_shared" not in room


def test_only_files_with_a_function_may_count(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def keep(): ...\n")
    (tmp_path / "shared.py").write_text("class A:\n    def keep(self): ...\n")
    assert PluginFolder(tmp_path, "keep").names() == ("judge",) and PluginFolder(tmp_path).names() == (
        "judge",
        "shared",
    )


def test_declarations_without_import(room: PluginFolder) -> None:
    """What a file declares is read without importing it."""
    assert room.literals("exact", {"KEYS": (), "LABELS": True}) == {"KEYS": ("a", "b"), "LABELS": True}
    assert room.title("exact") == "Exact matches" and room.title("maths") == ""
    with pytest.raises(ValueError, match="malformed"):
        room.literals("maths", {"KEYS": ()})


def test_a_hint_names_the_nearest_or_all(room: PluginFolder) -> None:
    assert room.hint("math") == "did you mean maths?"
    assert room.hint("zzz", "or your own") == "there are exact, maths; or your own"
    assert room.hint("aut", also=["auto"]) == "did you mean auto?"
