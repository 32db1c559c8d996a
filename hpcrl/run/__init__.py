"""The run directory and what is in it, the processes of a run, and how a machine may fail them.

Open `rundir.py` first: it lists every file of a run directory and who writes it.  `role.py` is what the `main` of every
role has in common, `peers.py` how the processes of an attempt find each other.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class CallableRoom(ModuleType):
    """This folder, which is also the function `hpcrl.run` of the Python API: one name, as a package may only have
    one."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """`hpcrl.api.run`."""
        return importlib.import_module("hpcrl.api").run(*arguments, **options)


sys.modules[__name__].__class__ = CallableRoom
