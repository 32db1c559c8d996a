"""The user's own code in a run directory: copies of the directories that custom functions are in.

    RUN/code/NAME/       a copy of each directory, made when the run directory was: what every process imports
    RUN/code/path.json   which of these directories, or of those in them, are searched for modules, in order
    RUN/code.json        which files these are, and where they were copied from
    RUN/live-code        exists while the run imports the modules from where they were written instead (--live-code)

Invariant: the copies are the first entries of `sys.path`, the directories of --code-path the next, before a role, or a
process that it starts, imports anything of the user's.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcrl.config.custom_functions import SNAPSHOT
from hpcrl.errors import CodeError, HpcrlError
from hpcrl.run.rundir import AttemptFailure, read_if_whole, write_atomic
from hpcrl.run.started_runs import LIVE, RECIPE
from hpcrl.utils.untrusted_files import Damaged, read_json, read_regular

#: their names in a run directory
CODE = "code"
RECORD = "code.json"
PATH = "path.json"  #: in RUN/code
#: an environment variable: the directories of --code-path, for the processes that a role starts
FIRST = "HPCRL_CODE_PATH"
_PLACE = re.compile(r"\(([^\s()]+\.py):\d+ in ")  #: of `custom_functions.place_of`


class CodeFile(msgspec.Struct, frozen=True):
    """A file that the run was begun with.

    Attributes:
        place: below RUN/code; "" for a script of the recipe's prepare commands, which is not copied.
        source: absolute path of the original.
        sha256: of the contents; "" of a symbolic link that is one in RUN/code too.
    """

    place: str
    source: str
    sha256: str


class CodeRecord(msgspec.Struct, frozen=True):
    """What code.json holds."""

    files: tuple[CodeFile, ...] = ()


def write_code_record(root: Path, record: CodeRecord) -> None:
    """Write RUN/code.json."""
    write_atomic(root / RECORD, msgspec.json.encode(record))


def read_code_record(root: Path) -> CodeRecord:
    """RUN/code.json; an empty record where there is none, or a damaged one: it is read to tell what has changed."""
    return read_if_whole(root / RECORD, CodeRecord) or CodeRecord()


def digest(path: Path) -> str:
    """Of the contents as they are now; "" where they cannot be read."""
    try:
        return hashlib.sha256(read_regular(path.resolve())).hexdigest()
    except OSError:
        return ""


def how_to_fix(root: Path, failure: AttemptFailure | None, again: str) -> str:
    """What to do after an attempt that ended with a mistake in the user's own code; "" after any other.

    Args:
        again: the command that resumes the run.
    """
    if failure is None or failure.kind != CodeError.__name__:
        return ""
    named = _PLACE.findall(failure.message)[-1:]
    copies = [file for file in read_code_record(root).files if file.place and Path(file.source).name in named]
    if copies and not (root / LIVE).exists():
        again += " --live-code"
    fixed = any(digest(Path(file.source)) != file.sha256 for file in copies)
    return again if fixed else f"fix {named[0] if named else 'it'}, then {again}"


def code_root(root: Path) -> Path | None:
    """The run directory with the copies for `root`, a run or one of its stages; None if it has none."""
    for place in (root, root.parent):
        if (place / CODE).is_dir() and (place == root or (place / RECIPE).is_file()):
            return place
    return None


def code_folders(root: Path) -> list[str]:
    """The directories of RUN/code that are searched for modules of a run, or of one of its stages; none where the
    modules are imported from where they were written.

    Raises:
        HpcrlError: if they are not known.
    """
    place = code_root(root)
    if place is None or (place / LIVE).exists():
        return []
    try:
        names = read_json(place / CODE / PATH, list[str])
    except (OSError, Damaged) as error:
        raise HpcrlError(f"{place / CODE / PATH} cannot be read: {error}", "start a new run of the recipe") from error
    return [str(place / CODE / name) for name in names]


def use_code(root: Path, code_path: Sequence[str] = ()) -> None:
    """Import the user's modules from the snapshot of the run in `root` from now on, in this process and in those that
    it starts.

    Args:
        code_path: the directories of --code-path, which come next.
    """
    for name, folders in ((SNAPSHOT, code_folders(root)), (FIRST, code_path)):
        if folders:
            os.environ[name] = os.pathsep.join(folders)
        else:
            os.environ.pop(name, None)
    use_inherited_code()


def use_inherited_code() -> None:
    """The same as the process that has started this one."""
    given = [entry for name in (SNAPSHOT, FIRST) for entry in os.environ.get(name, "").split(os.pathsep)]
    sys.path[:0] = [folder for folder in given if folder]
