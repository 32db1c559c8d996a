"""The rules that the tests themselves keep: where they are, and how much of a message's wording they expect."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import left_out
from tests.support import layers
from tests.support.sources import nodes, parsed, walk
from tests.test_architecture import MOST, ROOT

pytestmark = pytest.mark.lint
TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
#: folders of tests/ that are not a package's: helpers, whole runs, campaigns; and pages, examples and the wheel
NOT_PACKAGES = {"support", "whole_runs", "soak", "documents"}


def test_tests_lie_where_their_packages_do() -> None:
    """A folder in tests/ is a package under the same path, and a test named as a module of a smaller package is in it."""
    for path in FILES:
        folder = path.parent.relative_to(TESTS)
        if folder.parts and folder.parts[0] in NOT_PACKAGES:
            continue
        assert (ROOT / folder).is_dir(), f"{folder} is not a package of hpcrl"
        name = path.name.removeprefix("test_")
        packages = {found.parent.relative_to(ROOT) for found in (ROOT / folder).rglob(name)} if folder.parts else set()
        if path.name.startswith("test_") and packages:
            assert folder in packages, f"{path.relative_to(TESTS)} belongs in tests/{min(packages)}"
    for folder in {path.parent for path in TESTS.rglob("test_*.py")}:
        assert len(list(folder.glob("test_*.py"))) <= MOST, f"{folder} holds more than {MOST} files: divide it"


def test_what_tests_share_is_on_its_map() -> None:
    folder = Path(__file__).parent / "support"
    told = set(re.findall(r"\w+", (folder / "__init__.py").read_text()))
    there = {
        path.name.removesuffix(".py") for path in folder.iterdir() if path.name[0] != "_" and path.name != "README.md"
    }
    assert there <= told, f"tests/support/__init__.py does not name {sorted(there - told)}"


def test_files_of_layers_that_are_left_out() -> None:
    """A file is not imported for a mark that no selected test has, whatever else the expression says."""
    assert left_out("(process or vllm) and not cluster and not soak") == {"cluster", "soak"}
    assert left_out("not soak") == {"soak"}
    for text in ("", "soak", "not process or vllm", "not (a and not b)", "not (a and not b and (c or d)) and e"):
        assert left_out(text) == set(), text


#: ordinary words in a row that a test may expect of a message.  Four tell two errors of one class apart; more are a
#: sentence, and then whoever improves its wording has to mend tests that are not about it.
WORDS = 4
WORD = re.compile(r"""[("'`]*[A-Za-z][A-Za-z'’]*(-[a-z]+)*["'`)]*[,;:.?!]*""")


def literals(node: ast.expr) -> Iterator[ast.Constant]:
    """The literal texts of an expected text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node
    elif isinstance(node, ast.JoinedStr | ast.BinOp | ast.IfExp):
        for part in ast.iter_child_nodes(node):
            yield from literals(part) if isinstance(part, ast.expr) else ()


def rows(names: ast.expr, table: ast.expr, constants: dict[str, ast.expr]) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of every row of a table that a test goes through, by parametrize or by a loop."""
    if isinstance(names, ast.Constant):
        columns = [name.strip() for name in str(names.value).split(",")]
    else:
        columns = [str(getattr(name, "value", getattr(name, "id", ""))) for name in getattr(names, "elts", [names])]
    table = constants.get(table.id, table) if isinstance(table, ast.Name) else table
    for row in table.elts if isinstance(table, ast.List | ast.Tuple) else ():
        values = [row] if len(columns) == 1 else getattr(row, "elts", None) or getattr(row, "args", [])
        yield from zip(columns, values, strict=False)


def cases(function: ast.AST, constants: dict[str, ast.expr]) -> Iterator[ast.expr]:
    """What tables hold for the names that a function gives to `match=`, or looks for by `in`."""
    sought: set[str] = set()
    tables = []
    for node in walk(function):
        if isinstance(node, ast.Call):
            places = [word.value for word in node.keywords if word.arg == "match"]
            if getattr(node.func, "attr", "") == "parametrize" and ast.unparse(node.func) == "pytest.mark.parametrize":
                tables.append((node.args[0], node.args[1]))
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            places = [node.left]
        else:
            places = []
            if isinstance(node, ast.For):
                tables.append((node.target, node.iter))
        sought |= {name.id for place in places for name in ast.walk(place) if isinstance(name, ast.Name)}
    for names, table in tables:
        yield from (value for name, value in rows(names, table, constants) if name in sought)


SEARCHES = ("re.search", "re.match", "re.fullmatch", "re.findall")


def expected(path: Path) -> Iterator[ast.expr]:
    """The texts that tests look for: of `match=`, of `re.search` and its kin, left of `in`, and in tables of those."""
    constants = {
        node.targets[0].id: node.value
        for node in parsed(path).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in nodes(path):
        if isinstance(node, ast.Call):
            yield from (word.value for word in node.keywords if word.arg == "match")
            if isinstance(getattr(node.func, "value", None), ast.Name) and ast.unparse(node.func) in SEARCHES:
                yield node.args[0]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            yield node.left
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from cases(node, constants)


def longest_run(text: str) -> int:
    """The most ordinary words in a row: flags, paths, numbers and the like end a row."""
    best = row = 0
    for word in text.split():
        row = row + 1 if WORD.fullmatch(word) else 0
        best = max(best, row)
    return best


def test_no_test_expects_a_sentence() -> None:
    """Expect the flag, file, host or number that a message names, and the class of the error."""
    for path in FILES:
        for text in (text for node in expected(path) for text in literals(node)):
            assert longest_run(text.value) <= WORDS, (
                f"{path}:{text.lineno}: {text.value!r}: expect fewer words in a row"
            )


def test_trees_are_walked_whole() -> None:
    """The faster walk finds every node that ast.walk does, in its order: tests that look for what must not be there would
    pass over what it leaves out."""
    path = Path(__file__)
    assert all(a is b for a, b in zip(nodes(path), ast.walk(parsed(path)), strict=True))


def test_names_are_short() -> None:
    """A name says the topic in at most 50 characters; the sentence is the docstring."""
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                assert len(node.name) <= 50, f"{path}:{node.lineno}: {node.name}"


def test_every_entry_of_the_table_fits_a_test() -> None:
    """An entry of a test that has another name now would leave the test in another layer.

    `make lint` collects all files; a session of some files checks the entries of those.
    """
    fitted = {layers.entry_of(name) for name in layers.collected}
    folders = {
        str(parent) for name in layers.collected for parent in (Path(name.partition("::")[0]), *Path(name).parents)
    }
    lost = {entry for entry in layers.table() if entry not in fitted and entry.partition("::")[0] in folders}
    missing = {entry for entry in layers.table() if not (layers.TESTS / entry.partition("::")[0]).exists()}
    assert not lost | missing, sorted(lost | missing)


@pytest.mark.parametrize(
    ("marks", "layer"),
    [(set(), "core"), ({"process"}, "full"), ({"cluster"}, "full"), ({"process", "core"}, "core"), ({"lint"}, "lint")],
)
def test_marks_decide_unless_the_table_does(monkeypatch: pytest.MonkeyPatch, marks: set[str], layer: str) -> None:
    monkeypatch.setattr(layers, "table", lambda: {"a": "soak", "a/test_b.py::test_c[x]": "core"})
    assert layers.layer_of("d/test_e.py::test_f", marks) == layer
    assert layers.layer_of("a/test_b.py::test_c[y]", {"process"}) == "soak"
    assert layers.layer_of("a/test_b.py::test_c[x]", {"process"}) == "core"
    assert layers.layer_of("a/test_b.py::test_c[x]", {"soak"}) == "soak"


def test_more_skipped_tests_than_recorded_fail_ci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "baseline.toml").write_text('[skipped]\ncore = 3\n"full and cluster" = 0\n')
    monkeypatch.setattr(layers, "TESTS", tmp_path)
    monkeypatch.setenv("HPCRL_REQUIRE", "git")
    assert not layers.too_many_skipped("core", 3) and layers.too_many_skipped("vllm", 1)
    assert "allows 3" in layers.too_many_skipped("core", 4) and layers.too_many_skipped("full and cluster", 1)
    monkeypatch.delenv("HPCRL_REQUIRE")
    assert not layers.too_many_skipped("core", 4)


BUSY = """
import subprocess, sys, time
import pytest

@pytest.mark.core
def test_busy():
    {}
"""


@pytest.mark.parametrize(("recorded", "status"), [("a = 1e9", 0), ("a = 1.0", 1)])
def test_cpu_time_of_folders(tmp_path: Path, recorded: str, status: int) -> None:
    """That of workers and of their children counts; much more than is recorded fails CI."""
    work = "while time.process_time() < 3: pass"
    for folder, line in (("a", work), ("b", f"subprocess.run([sys.executable, '-c', 'import time\\n{work}'])")):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(BUSY.replace("{}", line))
    (tmp_path / "baseline.toml").write_text(f"[cpu_seconds.core]\n{recorded}")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = core")
    code = (
        "import pathlib, sys, pytest, tests.support.cpu_seconds as plugin; plugin.FILE = pathlib.Path('baseline.toml'); "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    words = ["-m", "core", "-n", "2", "-p", "tests.support.cpu_seconds", "tests"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env=os.environ | {"HPCRL_REQUIRE": "git", "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == status, done.stdout + done.stderr
    found = json.loads((tmp_path / ".pytest_cache/v/cpu_seconds/core").read_text())
    assert 0.5 < found["a"] / found["b"] < 2
