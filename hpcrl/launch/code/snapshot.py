"""RUN/code: copies of the modules of a run's custom functions, made when its directory is made.

Invariants: a run imports what was there when it was begun, in every attempt and on every host, unless --live-code says
otherwise; a copy holds regular files of the user's directories alone: links are followed to files within them, and to
nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hpcrl.config.custom_functions import is_foreign
from hpcrl.config.eval_sets import eval_sets
from hpcrl.config.options import Options
from hpcrl.config.plugin_points import POINTS, paths_of
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch.code.own_modules import OwnModules, python_path
from hpcrl.run.code_files import CODE, CodeFile, CodeRecord, read_code_record, write_code_record
from hpcrl.run.rundir import write_unread
from hpcrl.run.started_runs import LIVE, RECIPE
from hpcrl.run.storage_errors import describe
from hpcrl.untrusted_files import read_regular, touch

LARGE = 1 << 24  #: bytes of a data file to which a link is made in place of a copy
MANY = 5000  #: files, and
MUCH = 1 << 26  #: bytes, above which the size of a copy is worth a word
SKIPPED = ("__pycache__", "node_modules")  #: directories that hold nothing of the user's; nor do those with a dot
SCRIPTS = (".py", ".sh")
SHOWN = 3  #: names in a note


def say(text: str) -> None:
    print(f"hpcrl: note: {text}", file=sys.stderr, flush=True)


# ---- at the start of a run


def begin_code(
    root: Path, stages: Sequence[Options], prepare: Iterable[Sequence[str]], pythonpath: str | None = None
) -> None:
    """Copy what a new run imports of the user's into RUN/code, and record it; with --live-code only say that it is not
    copied.

    Args:
        prepare: the recipe's prepare commands, whose scripts are recorded.
        pythonpath: of the run's machines; None: as it is here.

    Raises:
        HpcrlError: for a file that cannot be copied.
    """
    if any(options.live_code for options in stages):
        touch(root / LIVE)
        return
    extra = next((found for options in stages if (found := options.train_env_vars.get("PYTHONPATH"))), "")
    own = OwnModules(python_path(pythonpath, extra))
    own.add(dict.fromkeys(path.rpartition(".")[0] for options in stages for path in function_paths(options)))
    files = {**_within(own), **own.files}
    _tell(own)
    sizes = {place: source.stat().st_size for place, source in files.items()}
    copied = sum(size for size in sizes.values() if size <= LARGE)
    if len(files) > MANY or copied > MUCH:
        say(
            f"the custom functions' modules are {len(files)} files of {copied / 2**20:.0f} MiB, copied to "
            f"{root / CODE}; --live-code imports them from where they are"
        )
    if linked := [str(files[place]) for place, size in sizes.items() if size > LARGE]:
        say(f"{_some(linked)}: larger than {LARGE >> 20} MiB, and linked in {root / CODE}, not copied")
    records = [_copy(source, root / CODE, place) for place, source in sorted(files.items())]
    records += [CodeFile("", str(path), _digest(path)) for path in _scripts(prepare)]
    if records:
        write_code_record(root, CodeRecord(tuple(records)))


def function_paths(options: Options) -> Iterator[str]:
    """The dotted path of every custom function of a stage, also those of its held-out sets."""
    every = [path for name in POINTS for path in paths_of(options, name)]
    with contextlib.suppress(UsageError):  # a file that the nodes alone have
        every += [word.word for found in eval_sets(options) for word in found.rewards if not word.file]
    yield from (path for path in dict.fromkeys(every) if not is_foreign(path))


def _tell(own: OwnModules) -> None:
    """Say what is imported from elsewhere all the same."""
    for module, file in own.editable.items():
        say(f"{module} is imported from {file}, an editable install, and is not copied: later edits count in the run")
    if own.outside:
        say(
            f"{_some(map(str, own.outside))} leads out of its directory and is not copied: later edits count in the run"
        )
    if own.absent:
        say(f"{_some(own.absent)} is not here and cannot be copied: the run imports what its machines have")


def _some(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")


def _scripts(prepare: Iterable[Sequence[str]]) -> Iterator[Path]:
    """The scripts among the words of the prepare commands."""
    for word in dict.fromkeys(word for command in prepare for word in command):
        if word.endswith(SCRIPTS) and os.path.isfile(word):
            yield Path(os.path.abspath(word))


# ---- copying


def _within(own: OwnModules) -> dict[str, Path]:
    """Place -> file of every file of the packages."""
    found = dict[str, Path]()
    for place, directory in own.packages.items():
        top = directory.parents[place.count("/")].resolve()
        for folder, names, files in os.walk(directory):
            names[:] = [name for name in names if _is_source(Path(folder, name))]
            for name in files:
                path = Path(folder, name)
                if path.suffix == ".pyc" or not path.is_file():
                    continue
                if not path.resolve().is_relative_to(top):
                    own.outside.append(path)
                    continue
                found[f"{place}/{path.relative_to(directory)}"] = path
    return found


def _is_source(folder: Path) -> bool:
    """Whether a directory in a package may hold what it imports or reads: no cache, environment or run."""
    hidden = folder.name in SKIPPED or folder.name.startswith(".")
    return not hidden and not any(os.path.exists(folder / name) for name in ("pyvenv.cfg", RECIPE))


def _copy(source: Path, code: Path, place: str) -> CodeFile:
    target = code / place
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if source.stat().st_size > LARGE:
            target.symlink_to(source.resolve())
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


def changed_files(root: Path, copied: bool) -> list[str]:
    """The originals that are not any more what the run was begun with.

    Args:
        copied: of the modules in RUN/code; or else of the scripts of the prepare commands.
    """
    files = (file for file in read_code_record(root).files if bool(file.place) == copied and file.sha256)
    return [file.source for file in files if _digest(Path(file.source)) != file.sha256]


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
    changed = [] if mark.exists() else changed_files(root, copied=True)
    if changed:
        say(
            f"{_some(changed)} changed since the run was begun: it imports the copies in {folder}, as before; "
            "hpcrl resume --live-code imports what is there now"
        )


def note_changed_scripts(root: Path) -> None:
    """Say which scripts of the prepare commands are not what they were when the run was begun: they run as they are."""
    if changed := changed_files(root, copied=False):
        say(f"{_some(changed)} changed since the run was begun: it prepares with what is there now")
