"""What a folder of files registers: a file each, found by its name, so that a new one needs no second place.

    REWARDS = PluginFolder(Path(...) / "rewards")
    REWARDS.names()                                       # ("exact", "math", ...)
    REWARDS.literals("math", {"KEYS": ()})                # constants that the file declares, without importing it
    REWARDS.hint("maths", "module.function")              # "did you mean math?"

Invariant: nothing is imported here, so a login node that lacks a plug-in's packages knows its name and what it
declares. Files that begin with an underscore are not plug-ins.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PluginFolder:
    """The plug-ins of one folder.

    Attributes:
        function: those alone that define it; "": all.
    """

    folder: Path
    function: str = ""

    def names(self) -> tuple[str, ...]:
        """All of them, sorted."""
        return _names(self.folder, self.function)

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def title(self, name: str) -> str:
        """The first line of its docstring, without a full stop."""
        return (ast.get_docstring(_parsed(self.folder / f"{name}.py")) or "").partition("\n")[0].rstrip(".")

    def literals(self, name: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """`defaults`, with the constants of these names that the file declares in their place.

        Raises:
            ValueError: if one of them is not a literal.
        """
        found = dict(defaults)
        for node in _parsed(self.folder / f"{name}.py").body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(target, ast.Name) and target.id in found and isinstance(node, ast.Assign):
                found[target.id] = ast.literal_eval(node.value)
        return found

    def hint(self, name: str, otherwise: str = "", also: Sequence[str] = ()) -> str:
        """What to do about an unknown name.

        Args:
            otherwise: what may be given in place of a name.
            also: names that are not files.
        """
        known = [*also, *self.names()]
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.5):
            return f"did you mean {near[0]}?"
        return f"there are {', '.join(known)}" + (f"; {otherwise}" if otherwise else "")


@cache
def _names(folder: Path, function: str) -> tuple[str, ...]:
    files = [path for path in folder.glob("*.py") if not path.stem.startswith("_")]
    return tuple(sorted(path.stem for path in files if not function or _defines(path, function)))


def _defines(file: Path, function: str) -> bool:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, functions) and node.name == function for node in _parsed(file).body)


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))
