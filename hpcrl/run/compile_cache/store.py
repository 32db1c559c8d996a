"""The directory of archives of compiled code: one file for each shape, seen by all nodes, of one user.

    DIRECTORY/                  mode 0700
      SHAPE.tar.gz              mode 0600
      .SHAPE.tar.gz.HOST.PID    being written

What is in an archive will be run.  Invariants: an archive is read only if it is a regular file of this user in a
directory of this user, neither of which another user can write to or replace; one is there whole or not at all; all
together have a bound, and those that were used longest ago go first.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from hpcrl.utils.untrusted_files import Damaged, make_parents

MOST = 16 << 30  #: bytes of all archives
END = ".tar.gz"
ABANDONED = 3600.0  #: seconds after which what is still being written is of a process that was killed
NAME = re.compile(r"[0-9a-z-]+\.tar\.gz")


class ArchiveDirectory:
    """A directory of archives, opened once: what is looked at is what is read, whatever its parents do meanwhile.

    Args:
        make: whether to make it, if it is not there.

    Raises:
        OSError: if it is not there; Damaged: if other users could have put something there.
    """

    def __init__(self, path: Path, make: bool = False, most: int = MOST) -> None:
        self.path = path
        self._most = most
        if make:
            with contextlib.suppress(FileExistsError):
                make_parents(path)
                path.mkdir(mode=0o700)
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(self._fd)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            os.close(self._fd)
            raise Damaged(f"{path} is not yours alone (chmod 700)")

    def __enter__(self) -> ArchiveDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def open(self, shape: str) -> BinaryIO:
        """The archive of a shape.

        Raises:
            OSError: FileNotFoundError if there is none; Damaged: if another user could have written it.
        """
        number = os.open(shape + END, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            os.close(number)
            raise Damaged(f"{self.path / (shape + END)} is not a file of yours alone")
        return open(number, "rb")

    def put(self, shape: str, write: Callable[[BinaryIO], object]) -> str:
        """Have an archive written, in place of the one of that shape; the identity of the new one.

        Raises:
            OSError: and whatever `write` raises; the old archive is there still.
        """
        half = f".{shape}{END}.{socket.gethostname().replace('/', '_')}.{os.getpid()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        number = os.open(half, flags, 0o600, dir_fd=self._fd)
        try:
            with open(number, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
                made = identity(os.fstat(file.fileno()))
            os.replace(half, shape + END, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(half, dir_fd=self._fd)
            raise
        self.trim(shape)
        return made

    def remove(self, shape: str) -> None:
        """Remove the archive of a shape, if that is possible."""
        with contextlib.suppress(OSError):
            os.unlink(shape + END, dir_fd=self._fd)

    def used(self, shape: str) -> None:
        """Note that an archive was of use, so that it stays."""
        with contextlib.suppress(OSError):
            file = os.open(shape + END, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                os.utime(file, ns=(time.time_ns(), os.fstat(file).st_mtime_ns))
            finally:
                os.close(file)

    def trim(self, shape: str) -> None:
        """Remove what killed processes have left, and the archives used longest ago beyond the bound, but not this."""
        new = shape + END
        total = 0
        for name, found in sorted(self._files(), key=lambda one: (one[0] != new, -one[1].st_atime)):
            half = name.startswith(".")
            total += 0 if half else found.st_size
            late = time.time() - found.st_mtime > ABANDONED
            if (half and late) or (NAME.fullmatch(name) and total > self._most and name != new):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._fd)

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        for name in os.listdir(self._fd):
            with contextlib.suppress(OSError):
                found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and END in name:
                    yield name, found


def identity(found: os.stat_result) -> str:
    """What tells an archive from the one that takes its place."""
    return f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"
