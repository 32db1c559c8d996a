"""What a launcher in Python finds in the sandbox of `hpcrl import` in place of packages that are not there: modules and
values that stand in for them.

Invariant: standard library alone, as `launcher.py`; what a stand-in cannot know appears in the arguments as
UNKNOWN:NAME, and a branch or a loop that depends on it is noted down with the script's line.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import random
import re
import sys
import time
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

DEPENDS = "hpcrl-depends"  #: a call of this name is a line of the script, and the unknown value that it depends on
INSTALLED = "hpcrl-installed"  #: a line, and the package that it would do without
MOST_DEPENDS = 8  #: that are noted down
HELPER = "command_utils"
OF_SIGNATURES = (typing.__file__, dataclasses.__file__, inspect.__file__)  #: what compares types without a choice
#: of the standard library, on other systems alone
ELSEWHERE = ("msvcrt", "nt", "winreg", "org")
OURS: dict[str, Any] = {}  #: a name of any missing package -> what it is here
OF_MODULES: dict[str, dict[str, Any]] = {}  #: a missing module -> its names, in place of OURS
SCRIPT = [""]  #: the launcher's path
_depends: list[str] = []


def note(*words: str) -> None:
    """Note a call down, as the prelude does."""
    place = f"{os.environ['HPCRL_CALLS']}/{time.time_ns() // 1000}-{os.getpid()}-{random.randrange(1 << 30)}"
    Path(place).write_bytes(b"".join(word.encode(errors="replace") + b"\0" for word in words))


def script_line() -> tuple[str, int]:
    """The file and the line that the launcher, or a module next to it, has come to."""
    frame = inspect.currentframe()
    near = f"{os.path.dirname(SCRIPT[0])}/"
    while frame is not None:
        if frame.f_code.co_filename.startswith(near):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", 0


def depend(name: str) -> None:
    """Note down that what the launcher does next depends on an unknown value."""
    frame = inspect.currentframe()
    asking = frame.f_back.f_back if frame and frame.f_back else None
    if asking is not None and asking.f_code.co_filename in OF_SIGNATURES:
        return
    file, line = script_line()
    if len(_depends) < MOST_DEPENDS and file:
        _depends.append(name)
        note(DEPENDS, str(line) if file == SCRIPT[0] else f"{line} of {os.path.basename(file)}", name)


class UnknownValue:
    """A value that only a real package could compute; as a decorator it leaves a function as it is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name_of(self._name, name, None if name == "run" else OURS.get(name))

    def __call__(self, *given: Any, **_: Any) -> Any:
        if len(given) == 1 and inspect.isfunction(given[0]) | inspect.isclass(given[0]):
            return given[0]
        return UnknownValue(self._name)

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()

    def __enter__(self, *_: object) -> UnknownValue:
        return self

    __getitem__ = __enter__

    def __exit__(self, *_: object) -> None:
        """Nothing was entered."""

    def __or__(self, other: Any) -> Any:
        kinds = (type, types.GenericAlias, types.UnionType, UnknownValue)
        return other if other is None or isinstance(other, kinds) else UnknownValue(self._name)

    __ror__ = __or__

    def __eq__(self, _: object = None) -> Any:
        return UnknownValue(self._name)

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__  # type: ignore[assignment]

    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __neg__ = __eq__
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = __eq__

    def __int__(self) -> int:
        depend(self._name)
        raise TypeError(f"{self} is no number")

    __float__ = __index__ = __int__  # type: ignore[assignment]

    def __fspath__(self) -> str:
        depend(self._name)
        return str(self)

    def __format__(self, _: str) -> str:
        return str(self)

    def __iter__(self) -> Iterator[Any]:
        depend(self._name)
        return iter(())

    def __bool__(self) -> bool:
        depend(self._name)
        return False

    def __len__(self) -> int:
        depend(self._name)
        return 0

    def __contains__(self, _: object) -> bool:
        depend(self._name)
        return False

    def __hash__(self) -> int:
        caller = inspect.currentframe()
        if caller and caller.f_back and caller.f_back.f_code.co_filename == SCRIPT[0]:  # not typing's, of a signature
            depend(self._name)
        return id(self)

    def __str__(self) -> str:
        return f"UNKNOWN:{self._name}"

    __repr__ = __str__


class StandIn(types.ModuleType):
    """A module that is not here."""

    __path__: typing.ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name_of(self.__name__, name, OF_MODULES.get(self.__name__, OURS).get(name))


def name_of(owner: str, name: str, ours: Any) -> Any:
    """A name of a package; one of slime's helper for launchers that is not known may do anything."""
    if ours is not None:
        return ours
    if owner.endswith(HELPER):
        depend(f"{owner}.{name}")
    return UnknownValue(f"{owner}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for each module that nothing else has found."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Every name is found, but those that the standard library itself can do without."""
        if name.startswith("_") or name.partition(".")[0] in {*ELSEWHERE, *sys.stdlib_module_names}:
            return None
        if may_be_missing():
            note(INSTALLED, str(script_line()[1]), name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The stand-in."""
        return StandIn(spec.name)

    def exec_module(self, _: types.ModuleType) -> None:
        """There is nothing to execute."""


def may_be_missing() -> bool:
    """Whether the line that the launcher has come to does something else where a package is not installed."""
    file, line = script_line()
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is find_spec_of_util.__code__:
            return True
        frame = frame.f_back
    return any(first <= line <= last for first, last in guarded(file))


@cache
def guarded(file: str) -> list[tuple[int, int]]:
    """The lines of a file that stand in a `try` which catches an ImportError."""
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, ValueError, SyntaxError):
        return []
    caught = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")
    return [
        (node.body[0].lineno, node.body[-1].end_lineno or 0)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        and any(
            handler.type is None
            or any(isinstance(kind, ast.Name) and kind.id in caught for kind in ast.walk(handler.type))
            for handler in node.handlers
        )
    ]


_find_spec = importlib.util.find_spec


def find_spec_of_util(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
    """importlib.util's, after which a launcher does something else where a package is not installed."""
    return _find_spec(name, package)


# ---- YAML


def read_yaml(stream: Any, *_: Any, **__: Any) -> Any:
    """yaml.safe_load, of names and values, and of lists of values."""
    text = stream if isinstance(stream, str) else stream.read()
    text = text.decode() if isinstance(text, bytes) else text
    found: dict[str, Any] = {}
    last = ""
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.split(" #")[0].rstrip() if not line.lstrip().startswith("#") else ""
        if not bare or bare == "---":
            continue
        name, colon, value = bare.partition(":")
        item = bare.strip().removeprefix("- ")
        where = f"{getattr(stream, 'name', 'its YAML')} line {number}"
        if bare.strip().startswith("- ") and last and isinstance(found[last], list | None):
            found[last] = [*(found[last] or []), yaml_value(item, where)]
        elif colon and name.isidentifier() | name.replace("-", "_").isidentifier() and value[:1] in ("", " "):
            last, value = name, value.strip()
            inner = value[1:-1].strip() if value[:1] + value[-1:] == "[]" else None
            found[name] = (
                yaml_value(value, where)
                if inner is None
                else [yaml_value(part.strip(), where) for part in inner.split(",") if inner]
            )
        else:
            sys.exit(f"{where}: only names with values, and lists of values, are read here")
    return found


def yaml_value(text: str, where: str) -> Any:
    """A scalar, as YAML 1.1 reads it: a number with an exponent has a dot, or is a string."""
    known = {"": None, "~": None, "null": None, "true": True, "yes": True, "on": True, "false": False, "no": False}
    if text.lower() in {**known, "off": 0}:
        return known.get(text.lower(), False)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" and not {"\\", text[0]} & set(text[1:-1]):
        return text[1:-1]
    if text[0] in "[]{}&*!|>%@`'\"," or ": " in text or text.endswith(":") or text.startswith("- "):
        sys.exit(f"{where}: only names with values, and lists of values, are read here")
    if re.fullmatch(r"[-+]?(0[\dxob_][\w]*|[\d.]*_[\d._]*|\d+:[\d:.]+|\.(inf|nan))", text, re.I):
        sys.exit(f"{where}: {text} is no plain number")
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+)", text):
        return float(text)
    return float(text) if re.fullmatch(r"[-+]?(\d+\.\d*|\.\d+)[eE][-+]\d+", text) else text
