"""RUN/code: copies of the modules of a run's custom functions, made when its directory is made.

Invariants: a run imports what was there when it was begun, in every attempt and on every host, unless --live-code says
otherwise; what a copy may lack is said when it is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hpcrl.config.custom_functions import is_foreign
from hpcrl.config.eval_sets import eval_sets
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import POINTS, paths_of
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.code.own_modules import OwnModules, python_path
from hpcrl.launch.code.package_files import LARGE, FoundFiles
from hpcrl.launch.code.trial_import import refuse_broken_copies
from hpcrl.run.code_files import CODE, CodeFile, CodeRecord, read_code_record, write_code_record
from hpcrl.run.rundir import write_unread
from hpcrl.run.started_runs import LIVE
from hpcrl.run.storage_errors import describe
from hpcrl.untrusted_files import as_given, read_regular, touch

MANY = 5000  #: files, and
MUCH = 1 << 26  #: bytes, above which the size of a copy is worth a word
ORIGINALS = 5.0  #: seconds for which the start of a job waits for a look at the originals of copied files
SCRIPTS = (".py", ".sh")
SHOWN = 3  #: names in a note


def say(text: str) -> None:
    print(f"hpcrl: note: {text}", file=sys.stderr, flush=True)


# ---- at the start of a run


def begin_code(
    root: Path,
    stages: Sequence[Options],
    prepare: Iterable[Sequence[str]],
    pythonpath: str | None = None,
    runs_here: bool = False,
) -> None:
    """Copy what a new run imports of the user's into RUN/code, and record it; with --live-code only say that it is not
    copied.

    Args:
        prepare: the recipe's prepare commands, whose scripts are recorded.
        pythonpath: of the run's machines; None: as it is here.
        runs_here: whether the code can be imported on this machine as on those of the run.

    Raises:
        HpcrlError: for a file that cannot be copied, and copies that cannot be imported.
    """
    if any(options.live_code for options in stages):
        touch(root / LIVE)
        return
    extra = next((found for options in stages if (found := options.train_env_vars.get("PYTHONPATH"))), "")
    first = [folder for options in stages for folder in options.code_path]
    path = python_path(pythonpath, extra, first)
    functions = list(dict.fromkeys(path for options in stages for path in function_paths(options)))
    _refuse_two_of_a_name(functions, first)
    own = OwnModules(list(path))
    own.add(dict.fromkeys(function.rpartition(".")[0] for function in functions))
    found = FoundFiles(own, root)
    _tell_size(found, root)
    records = [_copy(source, root / CODE, place) for place, (source, _) in sorted(found.sizes.items())]
    records += [CodeFile("", str(script), _digest(script)) for script in _scripts(prepare)]
    unknown = ""
    doubtful = found.outside or found.runs or found.skipped or own.added or own.doubts
    if runs_here and doubtful and (root / CODE).is_dir():
        unknown = refuse_broken_copies(root / CODE, functions, os.pathsep.join(path))
    _tell(found, unknown)
    if records:
        write_code_record(root, CodeRecord(tuple(records)))


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


def _tell_size(found: FoundFiles, root: Path) -> None:
    copied = sum(size for _, size in found.sizes.values() if size <= LARGE)
    if len(found.sizes) > MANY or copied > MUCH:
        say(
            f"the custom functions' modules are {len(found.sizes)} files of {copied / 2**20:.0f} MiB, copied to "
            f"{root / CODE}; --live-code imports them from where they are"
        )
    if linked := [str(source) for source, size in found.sizes.values() if size > LARGE]:
        say(f"{_some(linked)}: larger than {LARGE >> 20} MiB, and linked in {root / CODE}, not copied")


def _tell(found: FoundFiles, unknown: str) -> None:
    """Say what is imported from elsewhere all the same, and what a copy may lack.

    Args:
        unknown: why it is not known whether the copies can be imported.
    """
    own = found.own
    for module, file in own.editable.items():
        say(f"{module} is imported from {file}, an editable install, and is not copied: later edits count in the run")
    if own.absent:
        say(f"{_some(own.absent)} is not here and cannot be copied: the run imports what its machines have")
    for names, why in (
        (found.outside, "leads out of its directory and is not copied: the copy lacks it"),
        (found.runs, "is the directory of a run and is not copied"),
        (found.skipped, "and is not copied"),
        (
            dict.fromkeys(own.doubts),
            "finds files or modules by __file__ or sys.path, and not all that it may find is copied",
        ),
    ):
        if names:
            say(f"{_some(map(str, names))} {why}; --live-code imports everything from where it is")
    if unknown:
        say(f"whether the copies in {CODE} can be imported is not known: {unknown}")


def _some(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")


def _scripts(prepare: Iterable[Sequence[str]]) -> Iterator[Path]:
    """The scripts among the words of the prepare commands."""
    for word in dict.fromkeys(word for command in prepare for word in command):
        if word.endswith(SCRIPTS) and os.path.isfile(word):
            yield Path(os.path.abspath(word))


# ---- copying


def _copy(source: Path, code: Path, place: str) -> CodeFile:
    target = code / place
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if source.stat().st_size > LARGE:
            target.symlink_to(as_given(source))
            return CodeFile(place, str(source), "")
        data = read_regular(source.resolve(), most=LARGE)
        write_unread(target, data)
        if source.stat().st_mode & stat.S_IXUSR:
            target.chmod(0o700)
    except OSError as error:
        raise HpcrlError(
            f"{source} cannot be copied to {target}: {describe(error, target)}", "with --live-code nothing is copied"
        ) from error
    return CodeFile(place, str(source), hashlib.sha256(data).hexdigest())


# ---- later


def _digest(path: Path) -> str:
    """Of the contents as they are now; "" where they cannot be read."""
    try:
        return hashlib.sha256(read_regular(path.resolve(), most=LARGE)).hexdigest()
    except OSError:
        return ""


def changed_files(root: Path, copied: bool) -> tuple[list[str], list[str]]:
    """The originals that are not any more what the run was begun with, and those that are not there.

    Args:
        copied: of the modules in RUN/code; or else of the scripts of the prepare commands.
    """
    changed: list[str] = []
    absent: list[str] = []
    for file in read_code_record(root).files:
        if bool(file.place) == copied and file.sha256 and (now := _digest(Path(file.source))) != file.sha256:
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
            "hpcrl resume --live-code imports what is there now"
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
        say(f"{_some(changed)} changed since the run was begun: it prepares with what is there now")
