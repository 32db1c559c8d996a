"""The table of what the package looks like, as CONTRIBUTING.md has it typed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.house import cycles, read_module

REPO = Path(__file__).parents[1]


def test_code_is_told_from_what_is_not(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(
        '"""Doc.\n\nMore."""\n\nimport os\n\n# a comment\n\n\ndef f():\n    """Doc."""\n    return (\n        os\n    )\n'
    )
    module = read_module(file)
    assert (module.code, module.imports) == (5, 1)


def test_cycles_are_seen(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    (room / "a.py").write_text("def f():\n    from room import b\n")
    (room / "b.py").write_text("from room.c import x\n")
    (room / "c.py").write_text("if TYPE_CHECKING:\n    from room.a import f\nx = 1\n")
    modules = [read_module(file) for file in sorted(room.iterdir())]
    assert cycles(modules, room, types=False) == []
    assert cycles(modules, room, types=True) == [["room.a", "room.b", "room.c"]]


@pytest.mark.process
def test_the_command_as_printed() -> None:
    assert "`python -m tools.house`" in (REPO / "CONTRIBUTING.md").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "tools.house"], cwd=REPO, capture_output=True, text=True, timeout=120, check=True
    )
    assert "names in several files  0" in done.stdout
    assert "cycles at run time  0\n" in done.stdout
    assert "import cycles with types   0\n" in done.stdout
