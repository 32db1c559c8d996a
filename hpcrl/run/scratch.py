"""Directories on a host's own disk for as long as a process lives, found and removed after one that was killed.

    with scratch("engine") as folder:       # /tmp/hpcrl-engine-x7f2k1
        ...
    sweep()                                 # removes those whose makers are gone

Each holds a file that its maker has locked: the kernel lets go when the maker ends, however, and whatever namespaces
hide its number from us.  One of the kind STAYING is left for a while after that, for another process to take over.
Invariants: only directories of this user are removed, and never one whose maker lives; of files elsewhere only those
that the directory names, in /dev/shm, and this user's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from hpcrl.utils.untrusted_files import Damaged, open_regular, read_json

PREFIX = "hpcrl-"
LOCK = ".lives"
ELSEWHERE = ".elsewhere"
#: the lock until it is held: so a file named LOCK that is not held says at once that its maker is gone
NEW = ".lives.new"
STAYING = "copies"  #: a kind of directory that another process may take over once its maker is gone,
STAYS = 600.0  #: within so many seconds since something was last made or removed in it
HELD_AFTER = 1.0  #: seconds from the making of NEW to its being held, at most
SHARED, SHORT = (
    Path("/dev/shm"),
    Path("/tmp"),
)  #: SHORT: where sockets are if the temporary directory's name is too long for them


class Scratch:
    """A directory and the lock on it.

    Attributes:
        kind: what it is for, in its name.
    """

    def __init__(self, kind: str, below: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-", dir=below))
        self._lock = os.open(self.path / NEW, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a file system without locks: no other process could tell that this one is alive
            (self.path / NEW).unlink()
        else:
            (self.path / NEW).rename(self.path / LOCK)

    def name(self, files: Iterable[Path]) -> None:
        """Have these files in /dev/shm removed as well, should this process be killed."""
        with contextlib.suppress(OSError):
            (self.path / ELSEWHERE).write_bytes(msgspec.json.encode(sorted(map(str, files))))

    @classmethod
    def taken_over(cls, path: Path) -> Scratch | None:
        """A directory whose maker is gone, for this process to hold; None if it is held, or no such directory."""
        if not is_own_directory(path):
            return None
        try:
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return None
        found = cls.__new__(cls)
        found.path, found._lock = path, lock
        return found

    def leave(self) -> None:
        """Leave it for another process to take over."""
        with contextlib.suppress(OSError):
            os.utime(self.path)
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def remove(self) -> None:
        """Remove it; what cannot be removed stays."""
        _clear(self.path)
        with contextlib.suppress(OSError):
            os.close(self._lock)


@contextlib.contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """A directory for as long as the context."""
    made = Scratch(kind)
    try:
        yield made.path
    finally:
        made.remove()


def sweep() -> list[Path]:
    """Remove what killed processes of this user have left in the temporary directory, SHORT and SHARED; what went."""
    gone = []
    for place in {Path(tempfile.gettempdir()), SHORT, SHARED}:
        with contextlib.suppress(OSError):
            for path in place.glob(f"{PREFIX}*"):
                if is_own_directory(path) and _abandoned(path):
                    _remove(path)
                    gone.append(path)
    return gone


@contextlib.contextmanager
def swept() -> Iterator[None]:
    """Sweep before and after: also what processes leave that are killed meanwhile."""
    sweep()
    try:
        yield
    finally:
        sweep()


def is_own_directory(path: Path) -> bool:
    """Whether it is a directory of this user, and no link."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return False


def _abandoned(path: Path) -> bool:
    """Whether the maker of a directory with a lock is gone, and no other process is to take it over."""
    if path.name.startswith(f"{PREFIX}{STAYING}-"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime < STAYS:
                return False
    return _unheld(path / LOCK, 0.0) or _unheld(path / NEW, HELD_AFTER)


def _unheld(lock: Path, after: float) -> bool:
    """Whether a lock that is at least so many seconds old is not held."""
    try:
        with open_regular(lock) as file:
            if (
                time.time() - os.fstat(file.fileno()).st_mtime < after
            ):  # not even tried: its maker may be about to lock it
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except OSError:
        return False  # its maker lives, or it is not there


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError, Damaged):
        for name in read_json(path / ELSEWHERE, list[str]):
            file = Path(name)
            if file.parent == SHARED and file.lstat().st_uid == os.getuid() and stat.S_ISREG(file.lstat().st_mode):
                file.unlink()
    _clear(path)


def _clear(path: Path) -> None:
    """Remove a directory, its lock last: what a dying process puts there meanwhile stays for the next sweep, and under
    the lock."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name not in (LOCK, NEW):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
        if set(os.listdir(path)) <= {LOCK, NEW}:
            for name in (LOCK, NEW):
                (path / name).unlink(missing_ok=True)
            path.rmdir()
