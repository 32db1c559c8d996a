"""Which directories of the user's a run copies for its custom functions, which files of them, and of which commit.

These are the directories of --code-path, and those where a function's module is found: the one where the run is started
and those of PYTHONPATH, unless packages are installed there.  The recipe's directory is copied in place of directories
within it.  Of a git repository the files are copied that git lists, of another directory all.

Invariants: nothing of the user's is run; git runs without the programs that a repository's settings may name.  A home
directory, or one above it, is never copied.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import hpcrl
from hpcrl.config.module_search import find_module
from hpcrl.errors import UsageError
from hpcrl.run.process import run_command
from hpcrl.run.started_runs import COPY, RECIPE

MOST_FILES = 5000  #: of a directory that is copied, and
MOST_BYTES = 1 << 26
SECONDS = 60.0  #: in which git answers
_INSTALLED = ("site-packages", "dist-packages")
_CACHES = ("__pycache__", "node_modules")


class TooLargeDirectory(UsageError):
    """A directory has more files, or bytes, than are copied."""


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


def directories_of(modules: Sequence[str], path: Sequence[str], first: Sequence[str]) -> list[Path]:
    """The user's directories that a run needs, in the order of `path`.

    Args:
        modules: of the custom functions, by their dotted names.
        path: of `python_path`.
        first: the directories of --code-path, which are needed in any case.
    """
    own = [entry for entry in path if _is_own(Path(entry))]
    holding = {next((entry for entry in own if holds([entry], module)), "") for module in modules}
    return [Path(entry) for entry in own if entry in holding or entry in first]


def holds(folders: Sequence[str], module: str) -> bool:
    """Whether a module of this dotted name is in these directories; directories without __init__.py do not count."""
    where, parts, found = list(folders), module.split("."), False
    for depth in range(1, len(parts) + 1):
        spec = find_module(".".join(parts[:depth]), where, top=False)
        if spec is None:
            return False
        where, found = list(spec.submodule_search_locations or ()), spec.loader is not None
    return found


def outermost(folders: Sequence[Path], recipe: Path, run: Path) -> dict[Path, list[str]]:
    """The directories to copy -> their files: these, without those that are within another, or within that of the
    recipe, if that is not too large.

    Args:
        folders: none of them a home directory.
        recipe: the recipe's directory.
        run: the run directory.

    Raises:
        TooLargeDirectory: for one of `folders`.
    """
    found: dict[Path, list[str]] = {}
    if any(recipe in folder.parents for folder in folders) and not is_home(recipe):
        with contextlib.suppress(TooLargeDirectory):
            found[recipe] = files_of(recipe, run)
    for folder in sorted(folders, key=lambda each: len(each.parts)):
        if not any(folder in (base / name).parents for base, names in found.items() for name in names):
            found[folder] = files_of(folder, run)
    return found


def is_home(folder: Path) -> bool:
    """Whether a directory is the user's home directory, or above it."""
    return Path(os.path.expanduser("~")).resolve().is_relative_to(folder.resolve())


def files_of(folder: Path, run: Path) -> list[str]:
    """The files of a directory that are copied, relative to it; symbolic links to directories are among them.

    Args:
        run: the run directory, which is left out, as are other runs, caches and virtual environments.

    Raises:
        TooLargeDirectory: if they are too many.
    """
    found, total = [], 0
    names = _listed_by_git(folder, run)
    for name in _all_files(folder, run) if names is None else names:
        path = folder / name
        readable = os.path.isfile(path) or (path.is_symlink() and os.path.isdir(path))
        if (
            not readable or path.suffix == ".pyc" or any("\ud800" <= c <= "\udfff" for c in name)
        ):  # no UTF-8: not recorded
            continue
        found.append(name)
        total += 0 if is_kept_link(path, folder) else path.stat().st_size
        if len(found) > MOST_FILES or total > MOST_BYTES:
            raise TooLargeDirectory(
                f"{folder} has more than {MOST_FILES:,} files or {MOST_BYTES >> 20} MiB, and is not copied",
                "move the functions to a directory of their own and name it with --code-path; or import them from "
                "where they are with --live-code",
            )
    return found


def is_kept_link(path: Path, folder: Path) -> bool:
    """Whether a file of `folder` is a symbolic link that is a link in the copy too: one to a directory, or out of
    `folder`, unless it is a module."""
    if not path.is_symlink():
        return False
    return path.is_dir() or (path.suffix != ".py" and not path.resolve().is_relative_to(folder.resolve()))


def is_installed(module: Path) -> bool:
    """Whether the file or directory of a module belongs to an installed package, or to Python."""
    interpreter = (Path(prefix) / "lib" for prefix in (sys.base_prefix, sys.prefix))
    return bool(set(_INSTALLED) & {*module.parts}) or any(module.is_relative_to(folder) for folder in interpreter)


def _is_own(folder: Path) -> bool:
    """Whether what lies in a directory is the user's own, and not installed there."""
    return folder.is_dir() and not set(_INSTALLED) & {*folder.parts} and not any(folder.glob("*.dist-info"))


def _is_source(folder: Path, run: Path) -> bool:
    """Whether a directory may hold the user's code: it is no cache, environment, run or hpcrl itself."""
    if folder.name.startswith(".") or folder.name in _CACHES:
        return False
    if folder.resolve() in (run.resolve(), Path(hpcrl.__file__).resolve().parent):
        return False
    is_run = os.path.exists(folder / RECIPE) and os.path.exists(folder / COPY)
    return not is_run and not os.path.exists(folder / "pyvenv.cfg")


def _all_files(folder: Path, run: Path) -> Iterator[str]:
    for here, folders, files in os.walk(folder):
        below = os.path.relpath(here, folder)
        links = [name for name in folders if os.path.islink(os.path.join(here, name))]
        folders[:] = sorted(name for name in folders if name not in links and _is_source(Path(here, name), run))
        yield from (os.path.normpath(os.path.join(below, name)) for name in sorted([*files, *links]))


def _listed_by_git(folder: Path, run: Path) -> list[str] | None:
    """The files that git tracks, and those that it does not ignore; None where it lists none."""
    listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if not listed:
        return None
    sources = {"": True}

    def is_source(below: str) -> bool:
        if below not in sources:
            sources[below] = is_source(os.path.dirname(below)) and _is_source(folder / below, run)
        return sources[below]

    found: list[str] = []
    for name in sorted({*listed.split("\0")} - {""}):
        nested = folder / name
        if name.endswith("/") or (nested.is_dir() and not nested.is_symlink()):  # a repository within this one
            below = name.rstrip("/")
            if is_source(below):
                inner = _listed_by_git(nested, run)
                inner = list(_all_files(nested, run)) if inner is None else inner
                found += (os.path.join(below, each) for each in inner)
        elif is_source(os.path.dirname(name)):
            found.append(name)
    return found


def commit_of(folder: Path) -> str:
    """The commit that is checked out in the git repository around a directory; "" where git finds none.  Changes since
    then are not looked at."""
    return _git(folder, "rev-parse", "--verify", "--quiet", "HEAD").strip()


def _git(folder: Path, *words: str) -> str:
    """What git prints about a directory; "" where it fails."""
    settings = ("-c", "core.fsmonitor=false")  # else git starts the program that the repository names there
    place = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = run_command(["git", *settings, "-C", str(folder), *words], SECONDS, env=place)
    return "" if done.code else done.out
