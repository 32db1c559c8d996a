"""Names of torchvision, which vLLM's module for Qwen3.5 imports for images and which no model of text calls.

    absent_torchvision.install()        # in the process that is to import vLLM's module, and those that it starts

torchvision's wheel for PyPI needs the libraries of CUDA: with torch's CPU build it cannot be imported.

Invariant: whatever is taken out of it can be named, and raises when it is called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

NAME = "torchvision"
FOLDER = str(Path(__file__).with_name("absent"))  #: whose sitecustomize.py does so in another process


class _Absent(type):
    """A class whose attributes are again such classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{cls.__name__} is of torchvision, which is not installed")


class _Module(ModuleType):
    __version__ = "0.0"  #: transformers compares it with others as it is imported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != NAME:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def install() -> None:
    """From now on `import torchvision` finds these names; an installed one is found first."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
        os.environ["PYTHONPATH"] = os.pathsep.join([FOLDER, os.environ.get("PYTHONPATH", "")])
