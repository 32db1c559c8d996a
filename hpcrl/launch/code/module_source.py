"""What a module's source names: modules that it may import, and data files.

Invariant: nothing is run; of a computed name nothing is seen.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

_IMPORTERS = ("import_module", "__import__")
LONGEST = 200  #: characters of a text that may be a file's name


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The dotted names that a module may import; some may be names in a module.

    Args:
        package: that the module is in, "" for none.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])]).strip(".")
            yield from ([base] if base else [])
            yield from (f"{base}.{alias.name}".strip(".") for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).rpartition(".")[2] in _IMPORTERS:
            name = _text(node.args[0])
            yield from ([name] if name and not name.startswith(".") else [])


def named_files(tree: ast.AST, file: Path, root: Path) -> Iterator[Path]:
    """Regular files that the texts of a module name, relative to its directory or to one above it, up to `root`."""
    folders = [(folder, _names(folder)) for folder in file.parents if folder.is_relative_to(root)]
    for text in {text for node in ast.walk(tree) if (text := _file_name(node)) and len(text) <= LONGEST}:
        name = text.removeprefix("./")
        first = name.partition("/")[0]
        holding = [folder for folder, names in folders if first in names]
        if not holding or not name.isprintable() or ".." in Path(name).parts:
            continue
        for found in (folder / name for folder in holding):
            if found.suffix != ".py" and os.path.isfile(found) and found.resolve().is_relative_to(root.resolve()):
                yield found
                break


def _names(folder: Path) -> frozenset[str]:
    """What is in a directory; a module may have tens of thousands of texts, and only few are files."""
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()


def _file_name(node: ast.AST) -> str:
    """The relative path that an expression may end in: "x", ... / "data" / "x", join(..., "data", "x")."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and (last := _text(node.right)):
        before = _file_name(node.left) if isinstance(node.left, ast.BinOp) else ""
        return f"{before}/{last}" if before else last
    if isinstance(node, ast.Call):
        texts = [_text(argument) for argument in node.args]
        return "/".join(texts[1 if texts and not texts[0] else 0 :]) if all(texts[1:]) else ""
    return _text(node)


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
