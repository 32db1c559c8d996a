"""Where a user's module lies and what it defines, found without importing it or the packages around it.

A role starts as `python -m hpcrl...` in the directory where the run was started, so that directory comes before
everything else; then PYTHONPATH and the installed packages, as in `sys.path`.

Invariant: none of the user's code runs here.  `importlib.util.find_spec` would run it: it imports the packages above a
module.
"""

from __future__ import annotations

import ast
import contextlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

SHOWN = 10  #: names that a hint lists at most


def missing(path: str) -> tuple[str, str]:
    """Why there can be nothing at the dotted path `module.name`, and what to do; two empty texts where files do not
    tell."""
    if "/" in path or path.endswith(".py"):
        module = Path(path).stem
        return (
            "it is a file, and module.function is wanted",
            f"write {module}.FUNCTION, and start in the directory of {module}.py",
        )
    module, _, name = path.rpartition(".")
    if not module or module.partition(".")[0] in sys.stdlib_module_names:
        return "", ""
    parts = module.split(".")
    where = search_path()
    spec = None
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        spec = find_module(full, where, top=depth == 1)
        if spec is None:
            return f"there is no module {full}", _shadowed(parts[0]) if depth > 1 else searched()
        if spec.submodule_search_locations is None and depth < len(parts):
            return f"{full} is not a package", f"its file is {spec.origin}"
        where = list(spec.submodule_search_locations or ())
    if spec is None or not (spec.origin or "").endswith(".py"):
        return "", ""
    there = names_in(Path(str(spec.origin)))
    if name in there or "*" in there:
        return "", ""
    return f"{module} has no {name}", f"{spec.origin} defines {_listed(Path(str(spec.origin)))}"


def search_path() -> list[str]:
    """The directories in which a role looks for a top-level module, in order."""
    here = [] if os.environ.get("PYTHONSAFEPATH") else [os.getcwd()]
    return list(dict.fromkeys([*here, *(entry or os.getcwd() for entry in sys.path)]))


def find_module(name: str, entries: Sequence[str], top: bool) -> ModuleSpec | None:
    """The module with this full name in the directories `entries`, or None.

    top: whether it is a top-level module, for which the other finders of this interpreter (editable installs) are asked
    as well.
    """
    portions: list[str] = []
    for entry in entries:
        finder = pkgutil.get_importer(entry)
        spec = finder.find_spec(name) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec.submodule_search_locations or []) if spec is not None else []
    if not portions:
        return _asked_elsewhere(name) if top else None
    found = ModuleSpec(name, None, is_package=True)
    found.submodule_search_locations = portions
    return found


def _asked_elsewhere(name: str) -> ModuleSpec | None:
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # a package's own finder, whatever it does
            if finder is not PathFinder and (spec := finder.find_spec(name, None)) is not None:
                return spec
    return None


def searched() -> str:
    """Where modules are looked for, as a hint."""
    return f"modules are looked for in {os.getcwd()}, where the run is started, and in PYTHONPATH"


def _shadowed(top: str) -> str:
    """The hint for a module that is missing in the package `top`: another package of that name may hide the user's
    directory."""
    spec = find_module(top, search_path(), top=True)
    own = Path.cwd() / top
    if spec is not None and spec.origin and own.is_dir() and Path(spec.origin).parent != own:
        return f"{top} is the package in {Path(spec.origin).parent}, which hides {own}: put an __init__.py there"
    return searched()


def names_in(file: Path) -> set[str]:
    """Names that a module's source binds anywhere; "*" if it may bind others, or cannot be read."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {"*"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif node.id in ("globals", "setattr"):
                found.add("*")
    return found | ({"*"} if "__getattr__" in found else set())


def _listed(file: Path) -> str:
    """The functions and classes that a module defines at its top level."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return listed(node.name for node in ast.parse(file.read_bytes()).body if isinstance(node, kinds))


def listed(names: Iterable[str]) -> str:
    """The first SHOWN of these names, for a hint."""
    return ", ".join(list(names)[:SHOWN]) or "no functions"
