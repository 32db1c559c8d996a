"""Files into a box and out of it, by the first process of the box: every path and link is resolved inside.

Invariant: only regular files of the box's own disk or image are read and written; nothing here waits for a pipe, and
nothing is read beyond a bound.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from typing import Any

from hpcrl.sandbox.inside.kernel import libc

WORK = "/work"  #: where commands begin, and their home
MOST_ENTRIES = 10_000  #: of one directory that are listed
_WAITLESS = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_OPENAT2 = 437  #: on every architecture
_NO_MAGIC = 2  #: RESOLVE_NO_MAGICLINKS
_HERE = -100  #: AT_FDCWD
_LONGEST = 4096  #: PATH_MAX
_KINDS = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISLNK, "link"))


def place_of(path: str) -> str:
    """A path inside; one that is not absolute begins at the working directory."""
    return os.path.join(WORK, path)


def open_inside(path: str, flags: int, mode: int = 0) -> int:
    """`os.open`, which follows no link of /proc's: these lead to files outside, by way of this process.

    Before Linux 5.6 the kernel cannot be told so.

    Raises:
        OSError: ELOOP for such a link, and whatever else the kernel says.
    """
    if "\0" in path:
        raise OSError(errno.EINVAL, "embedded null byte", path)
    how = ctypes.create_string_buffer(struct.pack("=QQQ", flags, mode if flags & os.O_CREAT else 0, _NO_MAGIC), 24)
    number = libc.syscall(_OPENAT2, _HERE, os.fsencode(path), how, ctypes.c_size_t(24))
    if number >= 0:
        return int(number)
    wrong = ctypes.get_errno()
    if wrong == errno.ENOSYS:
        return os.open(path, flags, mode)
    raise OSError(wrong, os.strerror(wrong), path)


def _make_folders(path: str) -> None:
    """`os.makedirs`, of any depth."""
    at = "/"
    for name in filter(None, path.split("/")):
        at = os.path.join(at, name)
        try:
            os.mkdir(at)
        except OSError:  # one that is there says so, or that its file system cannot be written to
            if not os.path.isdir(at):
                raise


def _regular(number: int, path: str) -> os.stat_result:
    found = os.fstat(number)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory", path)
    if not stat.S_ISREG(found.st_mode) or found.st_dev == os.stat("/proc").st_dev:
        raise OSError(errno.EINVAL, "is no regular file", path)
    return found


def write_file(path: str, data: bytes, mode: int) -> None:
    """Write a whole file, and make the directories above it.

    Raises:
        OSError: if it cannot be written, or the disk is full.
    """
    full = place_of(path)
    if len(os.fsencode(full)) >= _LONGEST:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
    _make_folders(os.path.dirname(full))
    number = open_inside(full, os.O_WRONLY | os.O_CREAT | _WAITLESS, 0o600)
    try:
        _regular(number, path)
        os.ftruncate(number, 0)
        place = 0
        while place < len(data):
            place += os.write(number, data[place:])
        os.fchmod(number, mode & 0o777)
    finally:
        os.close(number)


def read_file(path: str, most: int) -> bytes:
    """A whole file.

    Raises:
        OSError: if it cannot be read, or has more than `most` bytes (EFBIG).
    """
    number = open_inside(place_of(path), os.O_RDONLY | _WAITLESS)
    try:
        found = _regular(number, path)
        data = b""
        while len(data) <= most and (more := os.read(number, min(most + 1, max(found.st_size, 1 << 16)))):
            data += more
    finally:
        os.close(number)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"has more than {most:,} bytes", path)
    return data


def list_files(path: str) -> list[dict[str, Any]]:
    """The entries of a directory, by name; links are not followed.

    Raises:
        OSError: if it is not a directory, or has more than MOST_ENTRIES (EFBIG).
    """
    found = []
    number = open_inside(place_of(path), os.O_RDONLY | os.O_DIRECTORY | _WAITLESS)
    try:
        with os.scandir(number) as entries:
            for entry in entries:
                if len(found) == MOST_ENTRIES:
                    raise OSError(errno.EFBIG, f"has more than {MOST_ENTRIES:,} entries", path)
                seen = entry.stat(follow_symlinks=False)
                kind = next((name for test, name in _KINDS if test(seen.st_mode)), "other")
                found.append({"name": entry.name, "kind": kind, "size": seen.st_size})
    finally:
        os.close(number)
    return sorted(found, key=lambda one: one["name"])
