"""Reads the source of a launcher in Python, and of the modules next to it, so that what Python tells no value of can be
noticed: `X is None`, `X is not None` and `isinstance(X, ...)`.

Invariant: standard library alone, as `launcher.py`; lines stay where they are, and of values that are known nothing is
answered otherwise.
"""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

from hpcrl.config.slime.launcher_values import SCRIPT, UnknownValue, depend

SAME, KIND = "__hpcrl_same__", "__hpcrl_kind__"  #: builtins of the launcher's


class Noticed(ast.NodeTransformer):
    """Hands operands of `is` and `isinstance` to the functions below; an assertion is no branch, and stays."""

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Is | ast.IsNot):
            return node
        asked = ast.Call(ast.Name(SAME, ast.Load()), [node.left, *node.comparators], [])
        return ast.copy_location(ast.UnaryOp(ast.Not(), asked) if isinstance(node.ops[0], ast.IsNot) else asked, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            node.func = ast.copy_location(ast.Name(KIND, ast.Load()), node.func)
        return node


def same(a: Any, b: Any) -> bool:
    """`a is b`, which depends on either."""
    for value in (a, b):
        if type(value) is UnknownValue:
            depend(value._name)
    return a is b


def kind(value: Any, wanted: Any) -> bool:
    """isinstance, which depends on a value or on a type that is unknown."""
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    for each in (value, *kinds):
        if type(each) is UnknownValue:
            depend(each._name)
            return False
    return isinstance(value, wanted)


def compiled(source: bytes | str, path: str) -> types.CodeType:
    """The code of a file of the launcher's."""
    return compile(ast.fix_missing_locations(Noticed().visit(ast.parse(source, path))), path, "exec", dont_inherit=True)


class NearLoader(importlib.machinery.SourceFileLoader):
    """Loads a module next to the launcher."""

    def get_code(self, fullname: str) -> types.CodeType:
        """Its code, from its source alone."""
        return compiled(self.get_data(self.path), self.path)


class NearFinder(importlib.abc.MetaPathFinder):
    """Finds the modules next to the launcher, as Python does."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The module's, if it is one of these."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        near = f"{os.path.dirname(SCRIPT[0])}/"
        if spec is None or not (spec.origin or "").startswith(near) or not (spec.origin or "").endswith(".py"):
            return None
        spec.loader = NearLoader(name, str(spec.origin))
        return spec


def run(path: str) -> None:
    """Run the launcher as `python PATH` would."""
    setattr(builtins, SAME, same)
    setattr(builtins, KIND, kind)
    sys.meta_path.insert(0, NearFinder())
    loader = NearLoader("__main__", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("__main__", loader))  # type: ignore[arg-type]
    module.__file__ = path
    sys.modules["__main__"] = module
    loader.exec_module(module)
