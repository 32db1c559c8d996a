"""Where modules of the user's are: found by their names, without importing anything above them, or named by their
files.

    --custom-rm-path ./my_rewards.py:brief              my_rewards.brief, with the file's directory in code_path
    custom_rm_path = "{recipe}/my_rewards.py:brief"     next to the recipe
    --rm-type math:1 ./my_rewards.py:brief:0.5

Invariants: the same directories, in the same order, as when a role imports them; what a file was when a run was begun
it stays for that run, from wherever that is resumed, and whatever has become of the file (`FunctionFile`).
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import MappingProxyType
from typing import Any, NamedTuple

from hpcrl.config.passthrough import flag
from hpcrl.errors import UsageError
from hpcrl.utils.untrusted_files import as_given


def search_path(first: Sequence[str] = ()) -> list[str]:
    """The directories in which a role looks for a top-level module, in order.

    Args:
        first: those of --code-path.
    """
    here = [] if os.environ.get("PYTHONSAFEPATH") else [os.getcwd()]
    return list(dict.fromkeys([*first, *here, *(entry or os.getcwd() for entry in sys.path)]))


def find_module(name: str, entries: Sequence[str], top: bool) -> ModuleSpec | None:
    """The module with this full name in the directories `entries`, or None.

    Args:
        top: whether it is a top-level module, for which the other finders of this interpreter (editable installs) are
            asked as well.
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


# ---- named by files

_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)(?P<weight>:[^:]*)?")
_NAME = re.compile(r"[A-Za-z_]\w*")


class FunctionFile(NamedTuple):
    """What FILE.py:FUNCTION is: the dotted path of the function, and the directory from which that leads to it."""

    path: str
    folder: str


def function_files(values: Mapping[str, Any], points: Collection[str]) -> dict[str, FunctionFile]:
    """Each FILE.py:FUNCTION of `values`, as it is written there -> what it is, seen from the current directory.

    Raises:
        UsageError: for a file that cannot be a module.
    """
    found: dict[str, FunctionFile] = {}
    for name in points:
        value = values.get(name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and (read := _as_module(item, name)) is not None:
                found[item] = read
    return found


def with_function_files(
    values: Mapping[str, Any], points: Collection[str], known: Mapping[str, FunctionFile] = MappingProxyType({})
) -> dict[str, Any]:
    """`values` of options, each FILE.py:FUNCTION as the dotted path that it is, its directory first in `code_path`.

    A file in a package (its directory has an __init__.py) is that package's module. Nothing is imported, and whether
    the file is there is asked where all functions are looked for: the machine that resolves a recipe need not have it.

    Args:
        points: the options that take dotted paths.
        known: `function_files` of these options when the run was begun.

    Raises:
        UsageError: for a file that cannot be a module, or two of one name.
    """
    found: dict[str, str] = {}

    def dotted(value: Any, name: str) -> Any:
        read = (known.get(value) or _as_module(value, name)) if isinstance(value, str) else None
        if read is None:
            return value
        top = read.path.partition(".")[0]
        if found.setdefault(top, read.folder) != read.folder:
            raise UsageError(f"{flag(name)} {value}: another {top} is in {found[top]}", "rename one of them")
        return read.path

    named = {
        name: [dotted(item, name) for item in value] if isinstance(value, list) else dotted(value, name)
        for name, value in values.items()
        if name in points
    }
    given = values.get("code_path", [])
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        return {**values, **named}  # its own error says so
    folders = dict.fromkeys([*found.values(), *(str(as_given(folder)) for folder in given)])
    return {**values, **named, **({"code_path": list(folders)} if folders else {})}


def _as_module(value: str, name: str) -> FunctionFile | None:
    """What a value of the option `name` is, if it names a file."""
    if not re.search(r"\.py(:|$)", value):
        return None
    shown = f"{flag(name)} {value}"
    match = _FILE.fullmatch(value)
    if match is None:
        stem = value.partition(".py")[0]
        raise UsageError(f"{shown} names a file and no function of it", f"write {stem}.py:FUNCTION")
    file = as_given(match["file"])
    parts, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file():
        parts, folder = [folder.name, *parts], folder.parent
    if not all(map(_NAME.fullmatch, parts)):
        raise UsageError(f"{shown}: {file.name} cannot be imported under its name", "rename it: letters, digits and _")
    if parts[0] in sys.stdlib_module_names or parts[0] == "hpcrl":
        whose = "hpcrl" if parts[0] == "hpcrl" else "Python"
        raise UsageError(f"{shown}: {parts[0]} is a module of {whose}'s own", "rename the file")
    return FunctionFile(".".join([*parts, match["name"]]) + (match["weight"] or ""), str(folder))
