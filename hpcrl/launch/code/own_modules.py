"""Which files of the user's a run imports: the modules of its custom functions, and what these import of the same
directories.

Own are the directory where the run is started and those of PYTHONPATH, unless packages are installed there; not
site-packages, and not what an editable install adds to `sys.path`.  A module in no package is copied alone, a package
with its whole directory.

Invariant: nothing of the user's is run: imports are read from the source, as are data files that a module of no package
names (`Path(__file__).parent / "words.txt"`).  Imports of computed names are not seen.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.config.custom_functions import find_module
from hpcrl.untrusted_files import read_given_bytes

_INSTALLED = ("site-packages", "dist-packages")
_IMPORTERS = ("import_module", "__import__")
LONGEST = 200  #: characters of a text that may be a file's name


def python_path(given: str | None, extra: str = "") -> list[str]:
    """The directories in which a role looks before those of its interpreter.

    Args:
        given: PYTHONPATH of the run's machines; None: as it is here.
        extra: PYTHONPATH of the trainer ranks alone.
    """
    here = [] if os.environ.get("PYTHONSAFEPATH") else [os.getcwd()]
    named = os.environ.get("PYTHONPATH", "") if given is None else given
    entries = [*named.split(os.pathsep), *extra.split(os.pathsep)]
    return list(dict.fromkeys([*here, *(os.path.abspath(entry) for entry in entries if entry)]))


def _own_root(folder: Path) -> bool:
    """Whether what lies in a directory is the user's own, and not installed there."""
    return folder.is_dir() and not set(_INSTALLED) & {*folder.parts} and not any(folder.glob("*.dist-info"))


@dataclass
class OwnModules:
    """What is found of the user's, by its place below RUN/code.

    Attributes:
        path: the directories of `python_path`.
        files: place -> file.
        packages: place -> the directory of a package.
        editable: modules that are neither the user's own nor installed as a copy -> their file.
        outside: links in a module's place that lead out of the directory where it is looked for.
        absent: what was asked for and is not there.
    """

    path: list[str]
    files: dict[str, Path] = field(default_factory=dict)
    packages: dict[str, Path] = field(default_factory=dict)
    editable: dict[str, Path] = field(default_factory=dict)
    outside: list[Path] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.roots = {Path(entry) for entry in self.path if _own_root(Path(entry))}
        self._seen: set[str] = set()
        self._todo: list[str] = []

    def add(self, modules: Iterable[str]) -> None:
        """Find these modules, by their dotted names, and all that they import."""
        for module in modules:
            if not self._visit(module):
                self.absent.append(module)
        while self._todo:
            self._visit(self._todo.pop())

    def _visit(self, module: str) -> bool:
        """Take a module with the packages above it; whether its first part is to be found."""
        parts = module.split(".")
        if module in self._seen or parts[0] in sys.stdlib_module_names or parts[0] == "hpcrl":
            return True
        self._seen.add(module)
        where, inside = [*self.path, *sys.path], False
        for depth in range(1, len(parts) + 1):
            full = ".".join(parts[:depth])
            spec = find_module(full, where, top=depth == 1)
            if spec is None:
                return depth > 1
            where = list(spec.submodule_search_locations or ())
            if spec.loader is not None:
                origin = Path(spec.origin or "")
                root = self._root_of(full, origin, depth + bool(where))
                if root is None:
                    return True
                inside = inside or self._take(parts[:depth], origin, package=bool(where))
                self._read(full, origin, bool(where), None if inside else root)
            if not where:
                return True
        return True

    def _root_of(self, full: str, origin: Path, levels: int) -> Path | None:
        """The user's directory in which a module was found, so many levels above its file; None if it is not his."""
        root = origin.parents[levels - 1] if len(origin.parents) >= levels else None
        if root in self.roots:
            if origin.resolve().is_relative_to(root.resolve()):
                return root
            self.outside.append(origin)
        elif origin.is_file() and not set(_INSTALLED) & {*origin.parts} and not _of_interpreter(origin):
            self.editable.setdefault(full.partition(".")[0], origin)
        return None

    def _take(self, parts: list[str], origin: Path, package: bool) -> bool:
        """Note a module, or the outermost package; whether it was a package."""
        if package:
            self.packages["/".join(parts)] = origin.parent
        else:
            self.files["/".join([*parts[:-1], origin.name])] = origin
        return package

    def _read(self, full: str, file: Path, package: bool, root: Path | None) -> None:
        """Have what a module imports visited, and take the data files that it names.

        Args:
            root: the directory in which it was looked for; None within a package, which is copied as a whole.
        """
        if f"{full}:" in self._seen or file.suffix != ".py":
            return
        self._seen.add(f"{full}:")
        try:
            tree = ast.parse(read_given_bytes(file))
        except (OSError, SyntaxError, ValueError, RecursionError):
            return  # importing it says so
        self._todo += imported(tree, full if package else full.rpartition(".")[0])
        if root is not None:
            self.files |= {str(found.relative_to(root)): found for found in named_files(tree, file, root)}


def _of_interpreter(file: Path) -> bool:
    return any(file.is_relative_to(Path(prefix) / "lib") for prefix in (sys.base_prefix, sys.prefix))


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The dotted names that a module may import; some may be names in a module.

    Args:
        package: that the module is in, "" for none.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])]).strip(".")
            yield from ([base] if base else [])
            yield from (f"{base}.{alias.name}".strip(".") for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).rpartition(".")[2] in _IMPORTERS:
            name = _text(node.args[0])
            yield from ([name] if name and not name.startswith(".") else [])


def named_files(tree: ast.AST, file: Path, root: Path) -> Iterator[Path]:
    """Regular files that the texts of a module name, relative to its directory or to one above it, up to `root`."""
    folders = [folder for folder in file.parents if folder.is_relative_to(root)]
    for name in {text for node in ast.walk(tree) if (text := _file_name(node))}:
        if len(name) > LONGEST or name.startswith("/") or not name.isprintable() or ".." in Path(name).parts:
            continue
        for folder in folders:
            found = folder / name
            if found.suffix != ".py" and found.is_file() and found.resolve().is_relative_to(root.resolve()):
                yield found
                break


def _file_name(node: ast.AST) -> str:
    """The relative path that an expression may end in: "x", ... / "data" / "x", join(..., "data", "x")."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and (last := _text(node.right)):
        before = _file_name(node.left) if isinstance(node.left, ast.BinOp) else ""
        return f"{before}/{last}" if before else last
    if isinstance(node, ast.Call):
        texts = [_text(argument) for argument in node.args]
        return "/".join(texts[1 if texts and not texts[0] else 0 :]) if all(texts[1:]) else ""
    return _text(node)


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
