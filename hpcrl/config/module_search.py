"""Where modules of the user's are: found by their names, without importing anything above them.

Invariant: the same directories, in the same order, as when a role imports them.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder


def search_path() -> list[str]:
    """The directories in which a role looks for a top-level module, in order."""
    here = [] if os.environ.get("PYTHONSAFEPATH") else [os.getcwd()]
    return list(dict.fromkeys([*here, *(entry or os.getcwd() for entry in sys.path)]))


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
