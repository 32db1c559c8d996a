"""The house rules that a reader relies on: floors, short rooms, nothing unpickled."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "hpcrl"
FILES = sorted(ROOT.rglob("*.py"))
WINGS = {"rollout", "engine", "trainer", "cluster"}
#: what each floor may not import
LIGHT = {"cli", "options", "flags", "plan", "rundir", "roles", "process", "errors"}
HEAVY = {"torch", "vllm", "megatron", "transformers", "ray"}


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, module, whether at the top of the file) of every import."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        yield from ((node.lineno, name, node in tree.body) for name in names)


def wing(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_floors(path: Path) -> None:
    for line, module, top in imports(path):
        parts = module.split(".")
        if parts[0] == "hpcrl" and len(parts) > 1 and parts[1] in WINGS:
            above = wing(path) in {parts[1], "cli", "__main__"}
            assert above, f"{path}:{line}: {wing(path)} imports the wing {parts[1]}"
        if wing(path) in LIGHT and top:
            assert parts[0] not in HEAVY, f"{path}:{line}: imports {module} at the top"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    for line, module, _ in imports(path):
        assert module.split(".")[0] not in {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, f"{path}:{line}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec"}, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_are_small_and_say_what_they_are_for(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 600
    tree = ast.parse(text)
    assert not tree.body or ast.get_docstring(tree), f"{path} has no docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 80, f"{path}:{node.lineno} {node.name} is long"


def test_nobody_listens_on_every_interface() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.strip() in {"0.0.0.0", "tcp://*", "::"}
            ):
                pytest.fail(f"{path}:{node.lineno}")
