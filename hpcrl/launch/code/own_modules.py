"""Which files of the user's a run imports: the modules of its custom functions, and what these import of the same
directories.

Own are the directories of --code-path, that where the run is started, and those of PYTHONPATH, unless packages are
installed there, and what a module in them adds to `sys.path` of them; not site-packages, and not what an editable
install adds.  A module in no package is copied alone, a package with its whole directory (`package_files.py`).

Invariant: nothing of the user's is run: imports are read from the source, as are the files and directories that a
module names (`Path(__file__).parent / "words.txt"`).  What cannot be told so is in `OwnModules.doubts`.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcrl.config.module_search import find_module
from hpcrl.launch.code.module_source import imported, named_files
from hpcrl.launch.code.paths_by_file import PathUse, mentioned, path_uses
from hpcrl.untrusted_files import read_given_bytes

_FINDS = (b"__file__", b"sys.path", b"addsitedir")  #: in the source of a module that finds others, or files
_INSTALLED = ("site-packages", "dist-packages")


def python_path(given: str | None, extra: str = "", first: Sequence[str] = ()) -> list[str]:
    """The directories in which a role looks before those of its interpreter.

    Args:
        given: PYTHONPATH of the run's machines; None: as it is here.
        extra: PYTHONPATH of the trainer ranks alone.
        first: those of --code-path.
    """
    here = [] if os.environ.get("PYTHONSAFEPATH") else [os.getcwd()]
    named = os.environ.get("PYTHONPATH", "") if given is None else given
    entries = [*named.split(os.pathsep), *extra.split(os.pathsep)]
    return list(dict.fromkeys([*first, *here, *(os.path.abspath(entry) for entry in entries if entry)]))


def _own_root(folder: Path) -> bool:
    """Whether what lies in a directory is the user's own, and not installed there."""
    return folder.is_dir() and not set(_INSTALLED) & {*folder.parts} and not any(folder.glob("*.dist-info"))


@dataclass
class OwnModules:
    """What is found of the user's, by its place below RUN/code.

    Attributes:
        path: the directories of `python_path`; what modules add to `sys.path` comes before them.
        files: place -> file.
        packages: place -> the directory of a package.
        folders: place -> a directory that a module names.
        visited: place -> file of every module that is imported, also within packages.
        editable: modules that are neither the user's own nor installed as a copy -> their file.
        doubts: "FILE:LINE" where a module uses a path by `__file__`, or changes `sys.path`, in a way that a copy may
            not follow.
        absent: what was asked for and is not there.
    """

    path: list[str]
    files: dict[str, Path] = field(default_factory=dict)
    packages: dict[str, Path] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    visited: dict[str, Path] = field(default_factory=dict)
    editable: dict[str, Path] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        #: a directory in which modules are looked for -> that which is RUN/code in the copy
        self.roots = {Path(entry): Path(entry) for entry in self.path if _own_root(Path(entry))}
        self._seen: set[str] = set()
        self._todo: list[str] = []
        self._missing: set[str] = set()
        self._uses: list[tuple[PathUse, Path, Path]] = []
        self._mentions: dict[Path, set[str]] = {}
        self._named_as_stdlib: set[str] = set()

    @property
    def added(self) -> bool:
        """Whether a module adds one of the user's directories to `sys.path`."""
        return any(folder != root for folder, root in self.roots.items())

    def add(self, modules: Iterable[str]) -> None:
        """Find these modules, by their dotted names, and all that they import."""
        for module in modules:
            self._named_as_stdlib |= {module.partition(".")[0]} & sys.stdlib_module_names
            if not self._visit(module):
                self.absent.append(module)
        while self._todo:
            if not self._visit(module := self._todo.pop()):
                self._missing.add(module)
        for use, file, root in self._uses:
            elsewhere = any(use.name in names for other, names in self._mentions.items() if other != file)
            if not use.name or elsewhere:
                self._take_named(use, file, root)

    def _visit(self, module: str) -> bool:
        """Take a module with the packages above it; whether its first part is to be found."""
        parts = module.split(".")
        known = parts[0] in sys.stdlib_module_names - self._named_as_stdlib or parts[0] == "hpcrl"
        if module in self._seen or known:
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
                root = self._root_of(full, origin, depth + bool(where), inside)
                if root is None:
                    return True
                inside = self._take(parts[:depth], origin, root, package=bool(where), inside=inside)
                self._read(full, origin, bool(where), self.roots[root], inside)
            if not where:
                return True
        return True

    def _root_of(self, full: str, origin: Path, levels: int, inside: bool) -> Path | None:
        """The user's directory in which a module was found, so many levels above its file; None if it is not his, or a
        link to a package that is installed."""
        root = origin.parents[levels - 1] if len(origin.parents) >= levels else None
        if root in self.roots:
            return root if inside or not set(_INSTALLED) & {*origin.resolve().parts} else None
        if origin.is_file() and not set(_INSTALLED) & {*origin.parts} and not _of_interpreter(origin):
            self.editable.setdefault(full.partition(".")[0], origin)
        return None

    def _take(self, parts: list[str], origin: Path, root: Path, package: bool, inside: bool) -> bool:
        """Note a module, or the outermost package; whether it was a package, or is in one.

        Args:
            inside: whether a package above it is noted.
        """
        below = [*root.relative_to(self.roots[root]).parts, *parts]
        place = "/".join([*below, origin.name] if package else [*below[:-1], origin.name])
        self.visited[place] = origin
        if not inside and package:
            self.packages["/".join(below)] = origin.parent
        elif not inside:
            self.files[place] = origin
        return inside or package

    def _read(self, full: str, file: Path, package: bool, root: Path, inside: bool) -> None:
        """Have what a module imports visited, and note the files that it names.

        Args:
            root: the directory that is RUN/code in the copy.
            inside: whether it is in a package, which is copied as a whole.
        """
        if f"{full}:" in self._seen or file.suffix != ".py":
            return
        self._seen.add(f"{full}:")
        try:
            source = read_given_bytes(file)
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError):
            return  # importing it says so
        self._mentions[file] = set(mentioned(tree))
        if any(word in source for word in _FINDS):
            self._note_uses(tree, file, root)
        self._todo += imported(tree, full if package else full.rpartition(".")[0])
        if not inside:
            self.files |= {str(found.relative_to(root)): found for found in named_files(tree, file, root)}

    def _note_uses(self, tree: ast.AST, file: Path, root: Path) -> None:
        try:
            for use in path_uses(tree, file):
                self._search(use, file, root) if use.searched else self._uses.append((use, file, root))
        except RecursionError:
            self.doubts.append(f"{file}:1")

    def _search(self, use: PathUse, file: Path, root: Path) -> None:
        """Look for modules in what a module adds to `sys.path`, where the copy does so too."""
        if use.path is not None and (use.path in self.roots or not os.path.isdir(use.path)):
            return
        if use.path is None or not use.moves or not use.path.is_relative_to(root):
            self._doubt(use, file)
            return
        self.roots.setdefault(use.path, root)
        self.path.insert(0, str(use.path))
        self._seen -= self._missing
        self._todo += self._missing
        self._missing.clear()

    def _take_named(self, use: PathUse, file: Path, root: Path) -> None:
        """Take the file or directory that a module names by `__file__`, if it is within the user's directory."""
        path = use.path
        if path is None or path == file or not os.path.exists(path):
            return
        linked = file.resolve() != root.resolve() / file.relative_to(root)  # `resolve` leads to another directory
        if not linked and any(path.is_relative_to(own) for own in self.packages.values()):
            return
        if linked or not path.is_relative_to(root) or file.is_relative_to(path):
            self._doubt(use, file)
        elif os.path.isfile(path):
            self.files[str(path.relative_to(root))] = path
        else:
            self.folders[str(path.relative_to(root))] = path

    def _doubt(self, use: PathUse, file: Path) -> None:
        self.doubts.append(f"{file}:{use.line}")


def _of_interpreter(file: Path) -> bool:
    return any(file.is_relative_to(Path(prefix) / "lib") for prefix in (sys.base_prefix, sys.prefix))
