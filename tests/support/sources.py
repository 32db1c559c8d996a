"""The sources as syntax trees, for tests of what is written in them: each file is parsed and walked once a process.

    for node in nodes(path): ...        # as ast.walk of the file has them
    for node in walk(function): ...     # the same of a part of it

To look for garbage among trees that are all kept takes four times as long as to parse them, so none is looked for.

Invariant: the same nodes in the same order as ast.walk has them, in half of its time.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from hpcrl.utils.imports import without_collection


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    with without_collection():
        return ast.parse(path.read_text("utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file's syntax tree."""
    with without_collection():
        return walk(parsed(path))


def walk(tree: ast.AST) -> list[ast.AST]:
    """A node and all below it, level by level."""
    found = [tree]
    for node in found:  # it grows meanwhile
        held = node.__dict__
        for name in node._fields:
            value = held.get(name)
            if isinstance(value, ast.AST):
                found.append(value)
            elif isinstance(value, list):
                found += [part for part in value if isinstance(part, ast.AST)]
    return found
