"""Which image a path is, and where it lies unpacked on this node.

All processes of a user on a node share one directory, below the temporary directory (a site's `scratch`, in a job).
It has the form of `hpcrl/run/scratch.py`: each process that uses it holds a shared lock on a file in it, so that the
sweep before and after each run removes it once none does.

Invariant: an image is unpacked once, by one process, under a name of its content's; what is there under that name is
whole, since it was made under another.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from hpcrl.errors import DataError, DeadlineError, HpcrlError, UsageError
from hpcrl.utils.deadline import Deadline, poll
from hpcrl.utils.locks import try_lock

SECONDS = 3600.0  #: that a process waits while another unpacks the same
_LOOK = 0.05
_LIVES = ".lives"  #: as hpcrl/run/scratch.py has it
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_held: dict[str, int] = {}  #: directory -> number of the file that this process holds the lock with


def image_root(image: str) -> str:
    """The unpacked root directory that an image is.

    Raises:
        UsageError: if the path is none.
    """
    path = Path(os.path.realpath(image))
    if not os.path.isabs(image) or not path.is_dir() or path == Path("/"):
        raise UsageError(
            f"the image {image!r} of a sandbox is no directory of {os.uname().nodename}",
            'give "system", or the absolute path of an unpacked root directory (apptainer build --sandbox makes one)',
        )
    if not any(os.path.lexists(path / name) for name in ("bin", "usr")):
        raise UsageError(
            f"the image {image!r} of a sandbox is a directory without bin and usr",
            "give the root directory of what `apptainer build --sandbox` or `docker export` has written, unpacked",
        )
    return str(path)


def staged(name: str, fill: Callable[[Path], None], what: str, below: str | None = None) -> str:
    """The directory `name` of this node, filled once.

    Args:
        fill: makes the directory that it is given, which is not there yet, and all that is to lie in it.
        what: it is, in errors.

    Raises:
        HpcrlError: as `image_root`.
    """
    folder = _shared(below)
    place = folder / name
    if place.is_dir():
        return str(place)
    with open(folder / f"{name}.lock", "a+b") as lock:  # "a": another may hold it
        deadline = Deadline(SECONDS)
        if not poll(lambda: try_lock(lock, lambda _: None), deadline, _LOOK):
            raise DeadlineError(f"{what}: another process unpacks it, for more than {SECONDS:g} s", f"see {folder}")
        if not place.is_dir():
            for left in folder.glob(f"{name}.part-*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            _fill(folder, place, fill, what)
    return str(place)


def _fill(folder: Path, place: Path, fill: Callable[[Path], None], what: str) -> None:
    part = folder / f"{place.name}.part-{os.getpid()}"
    try:
        fill(part)
        part.rename(place)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise HpcrlError(
                f"{what}: there is no room for it unpacked in {folder} ({error.strerror})",
                "point TMPDIR (in a job: `scratch` of the site's profile) at a directory of this node with more",
            ) from error
        raise DataError(f"{what}: it cannot be unpacked in {folder}: {error}", "see what is wrong there") from error
    except DataError as error:
        raise DataError(error.what if what in error.what else f"{what}: {error.what}", error.hint) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _shared(below: str | None) -> Path:
    """The directory of this user's on this node, which this process holds from now on."""
    folder = Path(below or tempfile.gettempdir()) / f"hpcrl-images-{os.getuid()}"
    try:
        while not _is_held(folder):
            folder.mkdir(mode=0o700, exist_ok=True)
            _hold(folder)
    except OSError as error:
        raise HpcrlError(f"{folder}: {error.strerror}", "point TMPDIR at a directory that you can write to") from error
    return folder


def _is_held(folder: Path) -> bool:
    """Whether the lock that this process has is on what is there now: a sweep may have removed it before."""
    number = _held.get(str(folder))
    with contextlib.suppress(OSError):
        return number is not None and os.path.samestat(os.fstat(number), (folder / _LIVES).lstat())
    return False


def _hold(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise HpcrlError(
            f"{folder} is not a directory of this user's alone", "remove it, or point TMPDIR at another directory"
        )
    with contextlib.suppress(FileNotFoundError):  # removed by a sweep meanwhile: it is made again
        number = os.open(folder / _LIVES, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: no sweep removes it
            fcntl.flock(number, fcntl.LOCK_SH)
        before = _held.pop(str(folder), -1)
        if before >= 0:
            os.close(before)
        _held[str(folder)] = number
