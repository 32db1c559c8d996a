"""Answers imports of slime and vime in processes that load functions written for them.

    answer_foreign_imports()        before the first function is loaded; as often as one likes

Invariants: a module or name of the table in `foreign_names.py` is hpcrl's own, whether a slime is installed or not, as
theirs would ask a router that does not exist; all other modules, and what the packages' own `__init__` have, are those
of an installed slime, or of a package of the user's that is called so; nothing of ours is imported before it is asked
for.
"""

from __future__ import annotations

import importlib
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
        is_package = not rest or rest in PACKAGES
        spec = ModuleSpec(fullname, self, origin="hpcrl's own", is_package=is_package)
        real = _real(fullname, path, target) if is_package else None
        if real is not None:
            spec.submodule_search_locations = list(real.submodule_search_locations or ())
            spec.loader_state = real
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = MODULES.get(module.__name__.partition(".")[2], {})
        real = module.__spec__.loader_state if module.__spec__ is not None else None
        if real is not None and real.loader is not None and not names:  # a namespace package has no loader
            real.loader.exec_module(module)
        for name, place in names.items():
            inner, _, theirs = place.partition(":")
            setattr(module, name, getattr(importlib.import_module(f"{OURS}.{inner}"), theirs))
        if "__getattr__" in vars(module):
            return

        def missing(name: str) -> Any:
            raise AttributeError(
                f"{module.__name__} has no {name} here: hpcrl answers for {', '.join(names) or 'its submodules'}"
            )

        module.__getattr__ = missing  # type: ignore[method-assign]


def _real(package: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """An installed package of this name, as any other finder has it: editable installations have finders of their
    own."""
    finders = (finder for finder in sys.meta_path if finder is not _FINDER)
    specs = (finder.find_spec(package, path, target) for finder in finders if hasattr(finder, "find_spec"))
    found = next((spec for spec in specs if spec is not None), None)
    return found if found is not None and found.submodule_search_locations is not None else None


_FINDER = ForeignFinder()


def answer_foreign_imports() -> None:
    """From now on."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
