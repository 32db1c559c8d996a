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
import functools
import gzip
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from hpcrl.errors import DataError, DeadlineError, HpcrlError, UsageError
from hpcrl.sandbox.images.archives import (
    ImageSettings,
    archive_settings,
    is_layout,
    layout_settings,
    unpack_archive,
    unpack_layout,
)
from hpcrl.sandbox.images.sif import is_sif, unpack_sif
from hpcrl.sandbox.images.tree import ImageTree
from hpcrl.utils.deadline import Deadline, poll
from hpcrl.utils.locks import try_lock

SECONDS = 3600.0  #: that a process waits while another unpacks the same
#: directories of each image that was unpacked
MOUNTED_ON = ("dev", "etc", "proc", "run", "sys", "tmp", "work")
_LOOK = 0.05
_LIVES = ".lives"  #: as hpcrl/run/scratch.py has it
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_held: dict[str, int] = {}  #: directory -> number of the file that this process holds the lock with


def image_root(image: str, below: str | None = None) -> str:
    """The unpacked root directory of an image: the path itself where it is one; may take minutes otherwise, once.

    Args:
        image: absolute path of an unpacked root, a SIF file, a Docker or OCI archive, or an OCI layout.
        below: the directory of this node's in which the shared one is; None: the temporary one.

    Raises:
        UsageError: if the path is no image.
        DataError: if the image is damaged, or tries to get out of its directory.
        HpcrlError: if there is no room for it here, or no program that can unpack it.
        DeadlineError: if another process unpacks it, and takes too long.
    """
    path = Path(os.path.realpath(image))
    unpack, identity = _kind_of(image, path)
    if unpack is None:
        return str(path)
    found = hashlib.sha256(f"{path}\0{identity}".encode(errors="surrogateescape")).hexdigest()[:20]

    def fill(root: Path) -> None:
        unpack(root)
        _complete(root)

    return staged(f"image-{found}", fill, str(path), below)


def image_settings(image: str) -> ImageSettings:
    """What an image sets for every command (`Env`, `WorkingDir` of its configuration); nothing where it is no archive
    and no layout.  A compressed archive is read to its end for this, once a process.

    Raises:
        DataError: if it is damaged.
    """
    path = Path(os.path.realpath(image))
    try:
        if not os.path.isabs(image) or not path.exists():
            return ImageSettings()
        found = path.stat()
        return _settings_of(path, found.st_size, found.st_mtime_ns)
    except OSError as error:
        raise DataError(f"the image {image}: {error.strerror}", "give one that you can read") from error
    except DataError as error:
        raise DataError(f"the image {image}: {error.what}", error.hint) from error


@functools.lru_cache(1024)
def _settings_of(path: Path, size: int, changed: int) -> ImageSettings:
    if path.is_dir():
        return layout_settings(path) if is_layout(path) else ImageSettings()
    return archive_settings(path) if _is_tar(path) else ImageSettings()


def _kind_of(image: str, path: Path) -> tuple[Callable[[Path], None] | None, str]:
    """(what unpacks it, what changes when its content does); None: there is nothing to unpack."""
    try:
        if os.path.isabs(image) and not path.exists():
            raise UsageError(f"the image {image!r} of a sandbox is not on {os.uname().nodename}", "see its path")
        if os.path.isabs(image) and path.is_dir():
            if not is_layout(path):
                _refuse_other(image, path)
                return None, ""
            index = (path / "index.json").lstat()
            return lambda root: unpack_layout(path, _tree(root)), f"{index.st_size} {index.st_mtime_ns} {index.st_ino}"
        if os.path.isabs(image) and path.is_file():
            found = path.stat()
            identity = f"{found.st_size} {found.st_mtime_ns} {found.st_ino}"
            if is_sif(path):
                return lambda root: unpack_sif(path, root), identity
            if _is_tar(path):
                return lambda root: unpack_archive(path, _tree(root)), identity
    except OSError as error:
        raise UsageError(f"the image {image!r} of a sandbox: {error.strerror}", "give one that you can read") from error
    raise UsageError(
        f"the image {image!r} of a sandbox",
        'give "system", or the absolute path of an unpacked root directory, a SIF file, or a Docker or OCI archive',
    )


def _refuse_other(image: str, path: Path) -> None:
    """Raise UsageError for a directory in which no command could be found: it is no unpacked root."""
    if path == Path("/"):
        raise UsageError(f"the image {image!r} of a sandbox", 'give "system", the programs of the node')
    if not any(os.path.lexists(path / name) for name in ("bin", "usr")):
        raise UsageError(
            f"the image {image!r} of a sandbox is a directory without bin and usr",
            "give the root directory of what `docker export` has written, unpacked",
        )


def _is_tar(path: Path) -> bool:
    with open(path, "rb") as file:
        first = file.read(512)
        if first.startswith(b"\x1f\x8b"):
            file.seek(0)
            with contextlib.suppress(OSError, EOFError), gzip.GzipFile(fileobj=file) as inner:
                first = inner.read(512)
    return first[257:262] == b"ustar"


def _tree(root: Path) -> ImageTree:
    root.mkdir()
    return ImageTree(root)


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


def _complete(root: Path) -> None:
    """Make the directories of a root that images may lack, and that containers are mounted on."""
    for name in MOUNTED_ON:
        if not os.path.lexists(root / name):
            (root / name).mkdir()


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
