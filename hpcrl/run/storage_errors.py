"""What the system says of files, in words that tell a full disk from a stale one: the one phrase for an OSError.

Invariants: what a file system does for a moment (full, read-only, stale) is told from what a path is (not there, not
ours); a probe of a directory leaves nothing in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpcrl.utils.waiting import Deadline, Pauses, retry

PATIENCE = 10.0  #: seconds for which a write that a run needs is tried again
TRIES = Pauses(0.1, 0.5)

#: errno -> (what is so, what to do)
WORDS: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("the file system is full", "free space"),
    errno.EDQUOT: ("your quota on the file system is used up", "free space, or ask for more"),
    errno.EROFS: (
        "the file system is read-only",
        "have it mounted for writing; after an error a kernel mounts it so by itself",
    ),
    errno.ESTALE: ("the network file system has lost it", "is its server up, and the directory still there?"),
    errno.EIO: ("the disk or the network file system fails", "see the host's kernel log, dmesg"),
    errno.ETIMEDOUT: ("the network file system does not answer", "is its server up?"),
    errno.EMFILE: ("this process has too many files open", "raise the hard limit, ulimit -Hn"),
    errno.ENFILE: ("the host has too many files open", "raise fs.file-max, or look who has them open"),
    errno.EPERM: ("the system does not permit it", "is the directory protected (lsattr), or another user's?"),
    errno.EACCES: ("you may not", "see its owner with ls -ld"),
    errno.ENOMEM: ("the host has no memory left for it", "ask for more memory"),
}
#: what a file system may say for a moment, and then no more: a network one while its server is started again, say
PASSING = WORDS.keys() - {errno.EPERM, errno.EACCES, errno.ENOMEM}

T = TypeVar("T")


def describe(error: OSError, path: Path | None = None) -> str:
    """What is wrong.

    Args:
        path: where; with a full file system it is said how much is free there.
    """
    theirs = error.strerror or str(error)
    if error.errno not in WORDS:
        return theirs
    where = path or (Path(os.fsdecode(error.filename)) if error.filename else None)
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and where is not None and (space := free(where)) is not None:
        theirs += f"; {space / 1e6:.1f} MB are free"
    return f"{WORDS[error.errno][0]} ({theirs})"


def remedy(error: OSError) -> str:
    """What to do about it; "" if that is not known."""
    return WORDS.get(error.errno or 0, ("", ""))[1]


def free(path: Path) -> int | None:
    """Bytes that are free where `path` is, or is to be; None if that cannot be found out."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return None


def lacks_space(said: str, directory: Path, needed: int) -> bool:
    """Whether a write into `directory` failed for lack of space.

    Args:
        said: the error's text, of whatever library: if it gives no reason, a further write may, or what is free in
            addition to the `needed` bytes.
    """
    full = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)]
    if any(text in said for text in full):
        return True
    space = free(directory)
    return any(text in write_obstacle(directory) for text in full) or (space is not None and space < needed)


def write_obstacle(directory: Path) -> str:
    """Why nothing can be written into a directory now; "" if something can."""
    probe = directory / f".probe-{os.getpid()}"
    try:
        with probe.open("wb", buffering=0) as file:
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
    except OSError as error:
        return f"{directory} cannot be written to: {describe(error, directory)}"
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return ""


def retry_while_passing(action: Callable[[], T], seconds: float | None = None) -> T:
    """What `action` returns; it is tried again for so long (PATIENCE) if a file system refuses it for a reason that may
    pass.  OSError."""
    deadline = Deadline(PATIENCE if seconds is None else seconds)
    return retry(action, lambda error: isinstance(error, OSError) and error.errno in PASSING, deadline, TRIES)
