"""The house rules that a reader relies on: floors, small rooms, nothing unpickled."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "hpcrl"
FILES = sorted(ROOT.rglob("*.py"))

#: the house from the ground up: a room (or a file of the ground floor) imports only what lies on floors below its own
FLOORS = (
    {"__init__", "errors"},
    {"config", "sample"},
    {"plan", "microbatches", "algorithms"},
    {"groups", "run"},
    {"model_files", "models", "queue", "report"},
    {"weights"},
    {"rollout", "engine", "trainer", "launch"},
    {"convert", "doctor"},
    {"slurm", "mpi"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
#: what takes seconds to import
HEAVY = {"torch", "vllm", "megatron", "transformers", "ray"}
#: rooms that a login node uses, where nothing heavy is imported at the top of a file
LIGHT = {"cli", "commands", "config", "doctor", "errors", "groups", "launch", "mpi", "plan", "report", "run", "sample", "slurm"}
MOST = 15  #: files in one room


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, module, whether at the top of the file) of every import."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"hpcrl.{alias.name}" for alias in node.names] if node.module == "hpcrl" else [node.module]
        yield from ((node.lineno, name, node in tree.body) for name in names)


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def room_of(module: str) -> str:
    """The room that an import of `hpcrl...` leads to; names of the package itself, such as __version__, lie in its __init__."""
    name = module.split(".")[1] if "." in module else "__init__"
    return name if name in FLOOR else "__init__"


def test_every_room_has_its_floor() -> None:
    assert {room(path) for path in FILES} == set(FLOOR)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_floors(path: Path) -> None:
    here = room(path)
    for line, module, top in imports(path):
        there = room_of(module)
        if module.split(".")[0] == "hpcrl" and there != here:
            assert FLOOR[there] < FLOOR[here], (
                f"{path}:{line}: {here} (floor {FLOOR[here]}) imports {there} (floor {FLOOR[there]})"
            )
        if here in LIGHT and top:
            assert module.split(".")[0] not in HEAVY, f"{path}:{line}: imports {module} at the top"


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda p: str(p.relative_to(ROOT.parent)))
def test_no_room_is_a_heap(folder: Path) -> None:
    files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MOST, f"{folder} holds {len(files)} files: divide it"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    for line, module, _ in imports(path):
        assert module.split(".")[0] not in {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, f"{path}:{line}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec"}, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are_for(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    tree = ast.parse(text)
    assert not tree.body or ast.get_docstring(tree), f"{path} has no docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{path}:{node.lineno} {node.name} is long"


def test_nobody_listens_on_every_interface() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.strip() in {"0.0.0.0", "tcp://*", "::"}
            ):
                pytest.fail(f"{path}:{node.lineno}")
