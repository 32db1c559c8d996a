"""Which functions are slime's: called with slime's samples.

Invariants: the module of the function itself decides, wherever it is installed: it is slime's if it imports slime or
vime, hpcrl's if it imports hpcrl.  Where it imports neither, the user's own modules that it uses decide.  An import
whose failure is caught says nothing.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from hpcrl.config.foreign_names import ROOTS, imported_roots
from hpcrl.run.role import say

DEEPEST = 64  #: wrappers around a function
#: module -> the modules that a function of it comes of -> why it is slime's, "" if it is not
_found: WeakKeyDictionary[ModuleType, dict[tuple[str, ...], str]] = WeakKeyDictionary()


def speaks_slime(function: Any, path: str = "") -> bool:
    """Whether a function comes of slime or vime, which the log says once in a process.

    Args:
        path: that names it, where it is known.
    """
    own = _own_modules(function, path)
    if not own:
        return False
    known, names = _found.setdefault(own[0], {}), tuple(module.__name__ for module in own)
    if names not in known:
        why = known[names] = _why(own)
        say(f"functions of {names[0]} are called with {f'slime samples: {why}' if why else 'hpcrl samples'}")
    return bool(known[names])


def _own_modules(function: Any, path: str) -> list[ModuleType]:
    """The module that a path names, then those of the function and of what it wraps, those of hpcrl and Python left
    out."""
    names = [path.rpartition(".")[0]]
    for _ in range(DEEPEST):
        names.append(_module_of(function))
        if (function := _inner(function)) is None:
            break
    found = [sys.modules[name] for name in dict.fromkeys(names) if name in sys.modules]
    return [module for module in found if module.__name__.partition(".")[0] not in _NO_USERS]


_NO_USERS = {*sys.stdlib_module_names, "hpcrl"} - {"__main__"}


def _inner(function: Any) -> Any:
    """What a wrapper wraps, None for what is none."""
    try:
        return function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)
    except Exception:  # noqa: BLE001  (a proxy of the user's)
        return None


def _why(own: list[ModuleType]) -> str:
    roots = {module.__name__: _roots_of(module) for module in own}
    for name, imported in roots.items():
        if name.partition(".")[0] in ROOTS or imported & set(ROOTS):
            return f"{name} imports {next(root for root in ROOTS if root in imported | {name.partition('.')[0]})}"
    if any("hpcrl" in imported for imported in roots.values()):
        return ""
    below = [Path.cwd(), *(root for module in own if (root := _root_of(module)) is not None)]
    waiting, seen = list(own), {module.__name__ for module in own}
    while waiting:
        for value in list(vars(waiting.pop()).values()):
            name = _module_of(value)
            if name in seen or name not in sys.modules:
                continue
            seen.add(name)
            module = sys.modules[name]
            file = _file_of(module)
            if name.partition(".")[0] in _NO_USERS or file is None or not _is_users(file, below):
                continue
            if found := _roots_of(module) & set(ROOTS):
                return f"{name}, which it uses, imports {min(found)}"
            waiting.append(module)
    return ""


def _roots_of(module: ModuleType) -> set[str]:
    file = _file_of(module)
    return set() if file is None else imported_roots(file)


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).absolute() if isinstance(file, str) and file.endswith(".py") else None


def _root_of(module: ModuleType) -> Path | None:
    """The directory from which a module was found, which its name begins in."""
    file = _file_of(module)
    above = module.__name__.count(".") + (file is not None and file.name == "__init__.py")
    return None if file is None or above >= len(file.parents) else file.parents[above]


def _is_users(file: Path, below: list[Path]) -> bool:
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    return not installed and any(file.is_relative_to(root) for root in below)


def _module_of(value: Any) -> str:
    """The module that a value is, or comes of; "" for one that does not say, or raises when it is asked."""
    try:
        name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
    except Exception:  # noqa: BLE001  (a proxy of the user's, which has nothing to stand for yet)
        return ""
    return name if isinstance(name, str) else ""
