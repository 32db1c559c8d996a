"""Where the trainer ranks of a host keep copies of their state in its memory: a directory in /dev/shm, mode 0700.

    with copies_directory(wanted, rundir):      # a host's process, for as long as it lives
        ...                                     # its ranks find it through the environment

    attempts/N/first-of-job         the launcher: the number of the attempt with which it began
    attempts/N/followed             the launcher: the hosts' processes end, and another attempt of the same job follows

Invariants: it outlives the ranks and the attempts of the process that made it, and that process where the launcher
begins another attempt (`followed`), or where it was killed: the next process of the same launcher on the host takes it
over.  It goes when the last of them ends; one of an earlier launcher of the run with the next process of the run there,
and any other with the next run of the user after some minutes (`scratch.sweep`).  One that was made above us, and is
this user's, is used and left there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.run.rundir import RunDir, listed, read_if_whole, write_atomic, write_unread
from hpcrl.run.scratch import PREFIX, SHARED, STAYING, Scratch, is_own_directory
from hpcrl.run.storage_errors import describe
from hpcrl.utils.untrusted_files import touch

COPIES = "HPCRL_COPIES"
FIRST = "first-of-job"  #: a file in attempts/N
FOLLOWED = "followed"  #: a mark there
OWNER = "owner.json"  #: a file in a directory of copies


class CopiesOwner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose a directory of copies is.

    Attributes:
        root: the directory of the run, or stage.
        first: the first attempt of the launcher.
    """

    root: str
    first: int


def copies_here() -> Path | None:
    """The directory of this host's copies, or None if there is none."""
    given = os.environ.get(COPIES)
    return Path(given) if given and is_own_directory(Path(given)) else None


# ---- the launcher's side


def tell_first(rundir: RunDir, first: int) -> None:
    """Say with which attempt the launcher of this one began."""
    write_atomic(rundir.here / FIRST, msgspec.json.encode(first))


def tell_followed(rundir: RunDir) -> None:
    """Say that another attempt follows this one, though its hosts' processes end; where that cannot be written, they
    take their copies with them."""
    with contextlib.suppress(OSError):
        touch(rundir.here / FOLLOWED)


# ---- the host's side


@contextlib.contextmanager
def copies_directory(wanted: bool, rundir: RunDir) -> Iterator[None]:
    """Have such a directory while in the context, if it is wanted and there is none.

    Args:
        rundir: of the attempt with which this process begins.

    Raises:
        HpcrlError: if it cannot be made.
    """
    if not wanted or copies_here() is not None:
        yield
        return
    first = read_if_whole(rundir.here / FIRST, int)  # the attempt that made the copies; no file: this one
    made = _have(CopiesOwner(str(rundir.root.resolve()), rundir.attempt if first is None else first))
    os.environ[COPIES] = str(made.path)
    try:
        yield
    finally:
        del os.environ[COPIES]
        if _followed(rundir.root):
            made.leave()
        else:
            made.remove()


def _followed(root: Path) -> bool:
    """Whether the launcher has said so of the last attempt."""
    with contextlib.suppress(OSError, HpcrlError):
        return FOLLOWED in RunDir.latest(root).signs()
    return False


def _have(owner: CopiesOwner) -> Scratch:
    """The directory that an earlier process of the same launcher has left, else a new one."""
    for name in sorted(listed(SHARED)):
        theirs = read_if_whole(SHARED / name / OWNER, CopiesOwner) if name.startswith(f"{PREFIX}{STAYING}-") else None
        if theirs and theirs.root == owner.root and (found := Scratch.taken_over(SHARED / name)) is not None:
            if theirs == owner:
                return found
            found.remove()
    try:
        made = Scratch(STAYING, SHARED)
    except OSError as error:
        raise HpcrlError(
            f"{SHARED} takes no copies of the trainer's state: {describe(error, SHARED)}",
            "leave out --non-persistent-save-interval",
        ) from error
    try:
        write_unread(made.path / OWNER, msgspec.json.encode(owner))
    except HpcrlError:
        made.remove()
        raise
    return made
