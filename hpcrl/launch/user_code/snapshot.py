"""RUN/code: copies of the directories of a run's custom functions, made when its own directory is made.

Invariants: of these directories a run imports what was there when it was begun, in every attempt and on every host,
unless --live-code says otherwise; which function is imported from elsewhere is said when they are copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from hpcrl.config.custom_functions import is_foreign
from hpcrl.config.eval_sets import eval_sets
from hpcrl.config.module_search import find_module
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import POINTS, paths_of
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.user_code.directories import (
    MOST_BYTES,
    directories_of,
    holds,
    is_home,
    is_installed,
    is_kept_link,
    outermost,
    python_path,
)
from hpcrl.run.code_files import CODE, PATH, CodeFile, CodeRecord, digest, read_code_record, write_code_record
from hpcrl.run.rundir import write_atomic, write_unread
from hpcrl.run.started_runs import LIVE
from hpcrl.run.storage_errors import describe
from hpcrl.utils.untrusted_files import as_given, read_regular, touch

ORIGINALS = 5.0  #: seconds for which the start of a job waits for a look at the originals of copied modules
SCRIPTS = (".py", ".sh")
SHOWN = 3  #: names in a note


def say(text: str) -> None:
    print(f"hpcrl: note: {text}", file=sys.stderr, flush=True)


# ---- at the start of a run


def begin_code(
    root: Path,
    stages: Sequence[Options],
    prepare: Iterable[Sequence[str]],
    recipe: Path,
    pythonpath: str | None = None,
) -> None:
    """Copy the directories of a new run's custom functions into RUN/code, and record it; with --live-code only say
    that they are not copied.

    Args:
        prepare: the recipe's prepare commands, whose scripts are recorded.
        recipe: its directory.
        pythonpath: of the run's machines; None: as it is here.

    Raises:
        UsageError: for a directory that is too large, or copies that lack a function's module.
        HpcrlError: for a file that cannot be copied.
    """
    if any(options.live_code for options in stages):
        touch(root / LIVE)
        return
    extra = next((found for options in stages if (found := options.train_env_vars.get("PYTHONPATH"))), "")
    first = [folder for options in stages for folder in options.code_path]
    functions = list(dict.fromkeys(path for options in stages for path in function_paths(options)))
    _refuse_two_of_a_name(functions, first)
    modules = list(dict.fromkeys(function.rpartition(".")[0] for function in functions))
    modules = [module for module in modules if module.partition(".")[0] != "hpcrl"]
    path = python_path(pythonpath, extra, first)
    needed = directories_of(modules, path, first)
    folders = [folder for folder in needed if not is_home(folder)]
    for folder in dict.fromkeys(needed).keys() - {*folders}:
        say(f"{folder} is a home directory or contains one, so it is not copied: later edits change the run")
    places, records = dict[Path, str](), list[CodeFile]()
    for base, names in outermost(folders, recipe, root).items():
        place = places[base] = _place_of(base, [*places.values(), PATH])
        records += [_copy(base / name, base, root / CODE, f"{place}/{name}") for name in names]
    records += [CodeFile("", str(script), digest(script)) for script in _scripts(prepare)]
    searched = [place for folder in folders if (place := _place_in(folder, places, root / CODE))]
    _check_modules(modules, [str(root / CODE / place) for place in searched], [*path, *sys.path])
    if searched:
        write_atomic(root / CODE / PATH, json.dumps(searched).encode())
    if records:
        write_code_record(root, CodeRecord(tuple(records)))


def _place_of(folder: Path, taken: Collection[str]) -> str:
    """A name for the copy of a directory: its own, with a number if another has that."""
    name = folder.name or "root"
    return next(each for number in count(1) if (each := f"{name}-{number}" if number > 1 else name) not in taken)


def _place_in(folder: Path, places: Mapping[Path, str], code: Path) -> str:
    """Where the copy of a directory is, below RUN/code; "" if it has no files."""
    bases = [base for base in reversed(places) if folder.is_relative_to(base)]
    found = (os.path.normpath(f"{places[base]}/{folder.relative_to(base)}") for base in bases)
    return next((place for place in found if (code / place).is_dir()), "")


def _check_modules(modules: Iterable[str], copies: Sequence[str], path: Sequence[str]) -> None:
    """Say which functions' modules are imported from elsewhere than the copies.

    Raises:
        UsageError: if the copies hold a part of a package, and not a function's module.
    """
    for module in modules:
        if holds(copies, module):
            continue
        top = module.partition(".")[0]
        if holds(copies, top):
            raise UsageError(
                f"the copy of {top} lacks {module}, which git ignores or which is a link",
                "have git list it, or import everything from where it is with --live-code",
            )
        spec = find_module(top, path, top=True)
        where = next(iter([*(spec.submodule_search_locations or []), spec.origin] if spec else []), None)
        if spec is None:
            say(f"{module} is not on this machine and cannot be copied: the run imports the module of its own machines")
        elif where and not is_installed(Path(where)):
            say(f"{module} is imported from {where} and is not copied: later edits change the run")


def _refuse_two_of_a_name(functions: Iterable[str], folders: Iterable[str]) -> None:
    """Raise UsageError for a function whose module is in two of the directories that the stages name: all import the
    same copy, and so one of them another's function."""
    for top in dict.fromkeys(function.partition(".")[0] for function in functions):
        places = [
            folder
            for folder in dict.fromkeys(folders)
            if Path(folder, f"{top}.py").is_file() or Path(folder, top, "__init__.py").is_file()
        ]
        if len(places) > 1:
            raise UsageError(f"{top} is in {places[0]} and in {places[1]}", "rename one: a run imports one of a name")


def function_paths(options: Options) -> Iterator[str]:
    """The dotted path of every custom function of a stage, also those of held-out sets."""
    every = [path for name in POINTS for path in paths_of(options, name)]
    with contextlib.suppress(UsageError):  # a file that the nodes alone have
        every += [word.word for found in eval_sets(options) for word in found.rewards if not word.file]
    yield from (path for path in dict.fromkeys(every) if not is_foreign(path))


def _some(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")


def _scripts(prepare: Iterable[Sequence[str]]) -> Iterator[Path]:
    """The scripts among the words of the prepare commands."""
    for word in dict.fromkeys(word for command in prepare for word in command):
        if word.endswith(SCRIPTS) and os.path.isfile(word):
            yield Path(os.path.abspath(word))


# ---- copying


def _copy(source: Path, folder: Path, code: Path, place: str) -> CodeFile:
    target = code / place
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if is_kept_link(source, folder):
            target.symlink_to(as_given(source))
            return CodeFile(place, str(source), "")
        data = read_regular(source.resolve(), most=MOST_BYTES)
        write_unread(target, data)
        if source.stat().st_mode & stat.S_IXUSR:
            target.chmod(0o700)
    except OSError as error:
        raise HpcrlError(
            f"{source} cannot be copied to {target}: {describe(error, target)}", "with --live-code nothing is copied"
        ) from error
    return CodeFile(place, str(source), hashlib.sha256(data).hexdigest())


# ---- later


def changed_files(root: Path, copied: bool) -> tuple[list[str], list[str]]:
    """The originals that are not any more what the run was begun with, and those that are not there.

    Args:
        copied: of the modules in RUN/code; or else of the scripts of the prepare commands.
    """
    changed: list[str] = []
    absent: list[str] = []
    for file in read_code_record(root).files:
        counts = file.sha256 and (file.place.endswith(".py") if copied else not file.place)
        if counts and (now := digest(Path(file.source))) != file.sha256:
            (changed if now else absent).append(file.source)
    return changed, absent


def resume_code(root: Path, live: bool | None) -> None:
    """Say from where a resumed run imports, where that makes a difference.

    Args:
        live: --live-code of the command; None: not given.

    Raises:
        UsageError: if the command can change nothing.
    """
    folder, mark = root / CODE, root / LIVE
    if live is not None and not folder.is_dir():
        what = "has no copy of custom functions" if mark.exists() else "has no custom functions"
        raise UsageError(f"--{'' if live else 'no-'}live-code has no effect: {root} {what}", "leave it out")
    if live:
        touch(mark)
    elif live is False:
        mark.unlink(missing_ok=True)
    if mark.exists():
        return
    changed, absent = changed_files(root, copied=True)
    if changed:
        say(
            f"{_some(changed)} changed since the run was begun: it imports the copies in {folder}, as before; "
            "hpcrl resume --live-code imports the current files"
        )
    if absent:
        say(f"{_some(absent)} cannot be read here: the run imports the copies in {folder}, as before")


def tell_changed_code(root: Path) -> None:
    """Say what `resume_code` says, of a job that starts; it waits a moment at most, since where the originals are may
    hang on a compute node, which needs them for nothing else."""

    def tell() -> None:
        try:
            resume_code(root, None)
        except HpcrlError as error:
            say(f"note: {error}")

    thread = threading.Thread(target=tell, name="changed code", daemon=True)
    thread.start()
    thread.join(ORIGINALS)


@contextlib.contextmanager
def switched_code(root: Path, live: bool | None) -> Iterator[None]:
    """`resume_code`, which is undone if what is done in this context fails."""
    mark = root / LIVE
    before = mark.exists()
    resume_code(root, live)
    try:
        yield
    except BaseException:
        if before:
            touch(mark)
        else:
            mark.unlink(missing_ok=True)
        raise


def note_changed_scripts(root: Path) -> None:
    """Say which scripts of the prepare commands are not what they were when the run was begun: they run as they are."""
    changed, absent = changed_files(root, copied=False)
    if changed := [*changed, *absent]:
        say(f"{_some(changed)} changed since the run was begun: it prepares with the current files")
