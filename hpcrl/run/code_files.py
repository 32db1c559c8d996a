"""The user's own code in a run directory: copies of the modules that custom functions are in.

    RUN/code/       a copy of each module, made when the run directory was: what every process of every attempt imports
    RUN/code.json   which files these are, and where they were copied from
    RUN/live-code   exists while the run imports the modules from where they were written instead (--live-code)

Invariants: RUN/code is the first entry of `sys.path`, the directories of --code-path the next, before a role, or a
process that it starts, imports anything of the user's; to find it takes a role three calls to the file system, however
large it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hpcrl.config.custom_functions import SNAPSHOT
from hpcrl.run.rundir import write_atomic
from hpcrl.run.started_runs import LIVE, RECIPE
from hpcrl.untrusted_files import Damaged, read_json

#: their names in a run directory
CODE = "code"
RECORD = "code.json"
#: an environment variable: the directories of --code-path, for the processes that a role starts
FIRST = "HPCRL_CODE_PATH"


class CodeFile(msgspec.Struct, frozen=True):
    """A file that the run was begun with.

    Attributes:
        place: below RUN/code; "" for a script of the recipe's prepare commands, which is not copied.
        source: absolute path of the original.
        sha256: of the contents; "" of a large data file, to which RUN/code has a symbolic link.
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
    try:
        return read_json(root / RECORD, CodeRecord)
    except (OSError, Damaged):
        return CodeRecord()


def code_root(root: Path) -> Path | None:
    """The run directory with the copies for `root`, a run or one of its stages; None if it has none."""
    for place in (root, root.parent):
        if (place / CODE).is_dir() and (place == root or (place / RECIPE).is_file()):
            return place
    return None


def code_folder(root: Path) -> Path | None:
    """RUN/code of a run, or of one of its stages; None where the modules are imported from where they were written."""
    place = code_root(root)
    return None if place is None or (place / LIVE).exists() else place / CODE


def use_code(root: Path, code_path: Sequence[str] = ()) -> None:
    """Import the user's modules from the snapshot of the run in `root` from now on, in this process and in those that
    it starts.

    Args:
        code_path: the directories of --code-path, which come next.
    """
    folder = code_folder(root)
    for name, value in ((SNAPSHOT, str(folder or "")), (FIRST, os.pathsep.join(code_path))):
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
    use_inherited_code()


def use_inherited_code() -> None:
    """The same as the process that has started this one."""
    given = [os.environ.get(SNAPSHOT, ""), *os.environ.get(FIRST, "").split(os.pathsep)]
    sys.path[:0] = [folder for folder in given if folder]
