"""The ratchet of tools/house.py: what is counted, what is refused, and that a ceiling only falls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.house import House, cycles, large, lowered, main, read_module, read_text

pytestmark = pytest.mark.lint
REPO = Path(__file__).parents[1]
TABLE = """\
[whole]
code = 4
files = 2
not_python = 2
tokens_per_line = 4.0

[scripts]
holds = ["examples/", "sbatch/"]
code = 3

[large]
allowed = []

[packages.cli]
holds = ["cli.py"]
code = 1
files = 1

[packages.run]
holds = ["run", "shipped"]
code = 3
files = 1
"""


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository that is exactly at its ceilings."""
    (tmp_path / "hpcrl/run").mkdir(parents=True)
    (tmp_path / "hpcrl/shipped").mkdir()
    (tmp_path / "hpcrl/cli.py").write_text('"""Doc."""\n\nx = [1]\n')
    (tmp_path / "hpcrl/run/rank.py").write_text("import os\n\n\ndef f():\n    return\n")
    (tmp_path / "hpcrl/run/start.sh").write_text("#!/bin/sh\n\n# a comment\nset -e\necho x\n")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/a.toml").write_text('[model]\nname = "x"\n')
    (tmp_path / "sbatch").mkdir()
    (tmp_path / "sbatch/a.sbatch").write_text("#!/bin/sh\n#SBATCH --nodes=2\n")
    (tmp_path / "house.toml").write_text(TABLE)
    return tmp_path


def broken(repo: Path) -> list[str]:
    return list(House(repo, repo / "house.toml").broken())


def test_code_is_told_from_what_is_not(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    file.write_text(
        '"""Doc.\n\nMore."""\n\nimport os\n\n# a comment\n\n\ndef f():\n    """Doc."""\n    return (\n        os\n    )\n'
    )
    module = read_module(file)
    assert (module.code, module.tokens) == (5, 11)
    page = tmp_path / "a.html.j2"
    page.write_text("{# of\nseveral lines #}\n<b>{{ name }}</b>\n\n")
    assert read_text(page) == (1, 12)


def test_cycles_are_seen(tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    (room / "a.py").write_text("def f():\n    from room import b\n")
    (room / "b.py").write_text("from room.c import x\n")
    (room / "c.py").write_text("if TYPE_CHECKING:\n    from room.a import f\nx = 1\n")
    modules = [read_module(file) for file in sorted(room.iterdir())]
    assert cycles(modules, room, types=False) == []
    assert cycles(modules, room, types=True) == [["room.a", "room.b", "room.c"]]


def test_a_repository_at_its_ceilings_is_allowed(repo: Path) -> None:
    assert broken(repo) == []


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("hpcrl/run/more.py", "y = 1\n", {"whole: code", "whole: files", "packages.run: code", "packages.run: files"}),
        ("hpcrl/run/rank.py", "a = [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" * 3, {"whole: tokens_per_line"}),
        ("hpcrl/new/rank.py", "", {"hpcrl/new"}),
        ("hpcrl/run/more.sh", "echo\n", {"whole: not_python"}),
        ("examples/b.py", "y = 1\n" * 201, {"scripts: code"}),
        ("examples/b.py", "#\n" * 401, {"examples/b.py"}),
        ("bench/b.py", "def f():\n" + "    #\n" * 100 + "    return\n", {"bench/b.py:f"}),
        ("bench/b.py", "class A:\n" + "".join(f"    def f{n}(self): ...\n" for n in range(26)), {"bench/b.py:A"}),
        ("hpcrl/cli.py", "class A: ...\n", set()),
    ],
)
def test_growth_is_refused(repo: Path, file: str, text: str, named: set[str]) -> None:
    """Each rule names what is beyond it, and nothing else does."""
    (repo / file).parent.mkdir(exist_ok=True)
    (repo / file).write_text(text)
    said = broken(repo)
    assert len(said) == len(named) and all(any(line.startswith(name) for line in said) for name in named), said


def test_names_and_circles_are_refused(repo: Path) -> None:
    (repo / "hpcrl/cli.py").write_text("from hpcrl.run import rank; A = 0\n")
    (repo / "hpcrl/run/rank.py").write_text("from hpcrl import cli\nclass B: ...\n")
    assert any("hpcrl.cli, hpcrl.run.rank" in line for line in broken(repo))
    (repo / "hpcrl/cli.py").write_text("class B: ...\n")
    assert any(line.startswith("class B") for line in broken(repo))


def test_only_what_is_listed_may_be_large(repo: Path) -> None:
    """An exception that is none any more has to go, as has the name of a folder that is gone."""
    (repo / "examples/b.py").write_text("#\n" * 401)
    table = TABLE.replace("allowed = []", 'allowed = ["examples/b.py"]')
    (repo / "house.toml").write_text(table)
    assert broken(repo) == []
    (repo / "examples/b.py").unlink()
    (repo / "house.toml").write_text(table.replace('"run"', '"run", "walk"'))
    assert [line.split()[0] for line in broken(repo)] == ["hpcrl/walk", "examples/b.py"]


def test_a_ceiling_only_falls(repo: Path) -> None:
    (repo / "hpcrl/run/rank.py").write_text("import os\n")
    (repo / "examples/a.toml").write_text("x = 1\n" * 9)
    fallen = lowered(TABLE, House(repo, repo / "house.toml").numbers())
    expected = TABLE.replace("code = 4", "code = 2").replace("tokens_per_line = 4.0", "tokens_per_line = 3.5")
    expected = expected.replace('"shipped"]\ncode = 3', '"shipped"]\ncode = 1')
    assert fallen == expected


def test_the_command_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every part of the repository is in the table; that it keeps the rules is what `make lint` asks."""
    assert "`python -m tools.house`" in (REPO / "CONTRIBUTING.md").read_text()
    assert main([]) == 0
    rows = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {"transport", "hpcrl", "not", "examples/", "tools/", "sbatch/", "sites/", "bench/", "tests/"} <= rows


def test_large_names_the_function(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("async def f():\n" + "    x = 1\n" * 100)
    assert [name for name, _ in large([read_module(tmp_path / "a.py")], tmp_path)] == ["a.py:f"]
