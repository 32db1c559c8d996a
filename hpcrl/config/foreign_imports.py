"""Answers imports of slime and vime in processes that load functions written for them.

    answer_foreign_imports()        before the first function is loaded; as often as one likes

Invariants: a module or name of the table in `foreign_names.py` is hpcrl's own, whether a slime is installed or not, as
theirs would ask a router that does not exist; all other modules are those of an installed slime; nothing of ours is
imported before it is asked for.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hpcrl.config.foreign_names import MODULES, PACKAGES, ROOTS

OURS = "hpcrl.rollout.slime_names"  #: the package that has what the table names


class ForeignFinder(MetaPathFinder, Loader):
    """Finds the modules of the table, and fills them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, rest = fullname.partition(".")
        if root not in ROOTS or not (not rest or rest in MODULES or rest in PACKAGES):
            return None
        spec = ModuleSpec(fullname, self, origin="hpcrl's own", is_package=not rest or rest in PACKAGES)
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations = _installed(fullname)
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = MODULES.get(module.__name__.partition(".")[2], {})
        for name, place in names.items():
            inner, _, theirs = place.partition(":")
            setattr(module, name, getattr(importlib.import_module(f"{OURS}.{inner}"), theirs))

        def missing(name: str) -> Any:
            raise AttributeError(
                f"{module.__name__} has no {name} here: hpcrl answers for {', '.join(names) or 'its submodules'}"
            )

        module.__getattr__ = missing  # type: ignore[method-assign]


def _installed(package: str) -> list[str]:
    """Directories of an installed package of this name."""
    inner = package.replace(".", "/")
    return [place for entry in sys.path if os.path.isdir(place := os.path.join(entry or os.getcwd(), inner))]


_FINDER = ForeignFinder()


def answer_foreign_imports() -> None:
    """From now on."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
