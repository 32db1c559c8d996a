"""Paths that a module computes from `__file__`, read from its source: `HERE / "rules"`, `f"{HERE}/rules/{name}.txt"`.

Invariant: nothing is run.  An expression that is understood in part gives the directory that it is certainly below.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_SAME = ("str", "fspath", "abspath", "realpath", "normpath", "resolve", "absolute", "expanduser", "as_posix")
_JOINED = ("Path", "PurePath", "PosixPath", "join", "joinpath")
_ADDING = ("insert", "append", "extend")


@dataclass(frozen=True)
class _Value:
    """What an expression comes to.

    Attributes:
        text: a path, or any text.
        own: whether it is computed from `__file__`.
        exact: whether it is that path; else one that is not known, below it.
    """

    text: str
    own: bool = False
    exact: bool = True


@dataclass(frozen=True)
class PathUse:
    """A place where a module uses a path.

    Attributes:
        line: in its source.
        path: absolute; None where that is not known.
        searched: whether it is added to `sys.path`.
        name: to which it is given: a use only if another module uses the name.
        moves: whether it is computed from `__file__`, and so is another one in a copy of the module.
    """

    line: int
    path: Path | None
    name: str = ""
    searched: bool = False
    moves: bool = True


def path_uses(tree: ast.AST, file: Path) -> Iterator[PathUse]:
    """The paths that a module computes from `__file__` and uses, and what it adds to `sys.path`.

    Args:
        tree: of the module's source.
        file: where it is, absolute.
    """
    reader = _PathReader(tree, file)
    yield from reader.uses(tree)


def mentioned(tree: ast.AST) -> Iterator[str]:
    """The names that a module takes from others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.attr


class _PathReader:
    """The values of a module's names and expressions, as far as they are texts and paths."""

    def __init__(self, tree: ast.AST, file: Path) -> None:
        self.file = file
        self.names = dict[str, _Value | None]()
        assigned = [(name, node.value) for node in ast.walk(tree) for name in _assigned(node)]  # type: ignore[attr-defined]
        for _ in range(3):  # a name may be made of names that are assigned further down in the tree
            self.names = self._values(assigned)

    def _values(self, assigned: list[tuple[str, ast.expr]]) -> dict[str, _Value | None]:
        found = dict[str, _Value | None]()
        for name, node in assigned:
            value = self.value(node)
            if name in found and found[name] != value:
                own = any(each is not None and each.own for each in (found[name], value))
                value = _Value(str(self.file.parent), own=True, exact=False) if own else None
            found[name] = value
        return found

    def uses(self, node: ast.AST) -> Iterator[PathUse]:
        """What is used in a part of the tree, the longest expressions."""
        if isinstance(node, ast.Constant):
            return
        if (added := _added(node)) is not None:
            for entry in added:
                value = self.value(entry)
                path = Path(os.path.abspath(value.text)) if value is not None and value.exact else None
                yield PathUse(entry.lineno, path, searched=True, moves=value is None or value.own)
            return
        for name in _assigned(node):
            if (value := self.value(node.value)) is not None and value.own:  # type: ignore[attr-defined]
                yield PathUse(node.lineno, Path(value.text), name=name.rpartition(".")[2])  # type: ignore[attr-defined]
                return
        if isinstance(node, ast.expr) and (value := self.value(node)) is not None and value.own:
            yield PathUse(node.lineno, _without_pattern(value.text))
            return
        for child in ast.iter_child_nodes(node):
            yield from self.uses(child)

    def value(self, node: ast.AST) -> _Value | None:
        """What an expression comes to; None if that is not known."""
        if isinstance(node, ast.Constant):
            return _Value(node.value) if isinstance(node.value, str) else None
        if isinstance(node, ast.Name) and node.id == "__file__":
            return _Value(str(self.file), own=True)
        if isinstance(node, ast.Name | ast.Attribute) and (name := ast.unparse(node)) in self.names:
            return self.names[name]
        if isinstance(node, ast.Attribute) and node.attr == "parent":
            return self._above(node.value, 1)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "parents":
            number = node.slice.value if isinstance(node.slice, ast.Constant) else None
            return self._above(node.value.value, number + 1) if isinstance(number, int) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return self._joined(node.left, [node.right])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._concatenated([node.left, node.right])
        if isinstance(node, ast.JoinedStr):
            return self._concatenated(
                [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
            )
        return self._called(node) if isinstance(node, ast.Call) else None

    def _called(self, node: ast.Call) -> _Value | None:
        name, receiver = ast.unparse(node.func).rpartition(".")[2], getattr(node.func, "value", None)
        on = self.value(receiver) if receiver is not None else None
        if on is not None and on.own:
            if name in _SAME:
                return on
            if name == "joinpath":
                return self._joined(receiver, node.args)
            if name == "with_name" and node.args:
                return self._join(_parent(on, 1), node.args)
            return None
        if not node.args:
            return None
        if name == "dirname":
            return self._above(node.args[0], 1)
        if name in _JOINED:
            return self._joined(node.args[0], node.args[1:])
        return self.value(node.args[0]) if name in _SAME else None

    def _above(self, node: ast.AST, levels: int) -> _Value | None:
        value = self.value(node)
        return _parent(value, levels) if value is not None and value.own else None

    def _joined(self, first: ast.AST, parts: Sequence[ast.AST]) -> _Value | None:
        value = self.value(first)
        return self._join(value, parts) if value is not None and (value.own or not parts) else None

    def _join(self, base: _Value, parts: Sequence[ast.AST]) -> _Value:
        for part in parts:
            value = self.value(part)
            if not base.exact or value is None or os.path.isabs(value.text):
                return _Value(base.text, own=True, exact=False)
            base = _Value(os.path.normpath(os.path.join(base.text, value.text)), own=True, exact=value.exact)
        return base

    def _concatenated(self, parts: Sequence[ast.AST]) -> _Value | None:
        text, own = "", False
        for part in parts:
            value = self.value(part)
            if value is None or not value.exact:
                below = text + (value.text if value is not None else "")
                own = own or (value is not None and value.own)
                below = below if os.path.isdir(below) else os.path.dirname(below)
                return _Value(os.path.normpath(below), own=True, exact=False) if own else None
            text, own = text + value.text, own or value.own
        return _Value(text, own)


def _without_pattern(text: str) -> Path:
    """A path, up to its first part that is a pattern for `glob`."""
    path = Path(text)
    return next((above for above in (*reversed(path.parents), path) if set("*?[") & set(above.name)), path / "x").parent


def _parent(value: _Value, levels: int) -> _Value:
    """So many levels above; of what is not known but for a directory that it is below, one level less."""
    path, levels = Path(value.text), levels - (not value.exact)
    above = path.parents[min(levels, len(path.parents)) - 1] if levels > 0 and len(path.parents) else path
    return _Value(str(above), own=True, exact=value.exact)


def _assigned(node: ast.AST) -> list[str]:
    """The names, as they are written, to which a statement gives a value."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        targets = [node.target]
    return [ast.unparse(target) for target in targets if isinstance(target, ast.Name | ast.Attribute)]


def _added(node: ast.AST) -> list[ast.expr] | None:
    """What a statement or call adds to `sys.path`; None if it adds nothing."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDING:
        given = node.args[-1:] if ast.unparse(node.func.value) == "sys.path" else None
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "addsitedir":
        given = node.args[:1]
    elif isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        changes = any(ast.unparse(target).partition("[")[0] == "sys.path" for target in targets)
        given = [node.value] if changes else None
    else:
        given = None
    if given is None:
        return None
    return [part for entry in given for part in (entry.elts if isinstance(entry, ast.List | ast.Tuple) else [entry])]
