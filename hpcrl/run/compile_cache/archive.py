"""One file for a directory of compiled code: a tar, compressed with gzip, of regular files alone.

Invariants: whatever an archive holds, nothing is written outside of the directory that it is unpacked into, no link is
made, and no more is written than was allowed; a file appears there only after all of the archive was read and its
checksum held, whole, and never in place of one that is there, which a process may have in use; a file that changes
while it is packed is left out.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import shutil
import stat
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple

from hpcrl.errors import DeadlineError
from hpcrl.utils.deadline import Deadline
from hpcrl.utils.untrusted_files import Damaged, open_regular

#: the folders of a directory of compiled code that are packed.  Not the modules that a model brings along: these are
#: copies of its own files, and are to come from there
FOLDERS = ("vllm", "triton", "inductor", "flashinfer")
MOST_BYTES = 4 << 30  #: of all files of an archive
MOST_FILES = 200_000
CHUNK = 1 << 20
LEVEL = 1  #: of gzip, the fastest
HALF = ".unpacking-"  #: what a directory is called until what is in it has been checked
ABANDONED = 600.0  #: seconds after which such a directory is of a process that was killed
TIME = "HPCRL.mtime_ns"  #: a header of ours: a tar's own has a float, and ninja compares nanoseconds
A_TIME = re.compile(r"-?[0-9]{1,19}")
#: what only serves while something is compiled
PASSING_FOLDERS = {"locks", "__pycache__"}
PASSING_ENDS = (".lock", ".tmp", ".pyc")


class CompiledFile(NamedTuple):
    """A file, as it is on the node."""

    size: int
    mtime: int  #: in nanoseconds


def listing(directory: Path) -> dict[str, CompiledFile]:
    """The files of a directory of compiled code that are worth packing, by their names in an archive.

    What goes meanwhile, and links, are left out.
    """
    found: dict[str, CompiledFile] = {}
    for folder in FOLDERS:
        for place, folders, names in os.walk(directory / folder):
            folders[:] = [name for name in folders if name not in PASSING_FOLDERS and not name.startswith("tmp")]
            for name in names:
                if name.endswith(PASSING_ENDS):
                    continue
                path = Path(place, name)
                with contextlib.suppress(OSError):
                    seen = path.lstat()
                    if stat.S_ISREG(seen.st_mode):
                        found[path.relative_to(directory).as_posix()] = CompiledFile(seen.st_size, seen.st_mtime_ns)
    return found


def pack(
    directory: Path, files: Mapping[str, CompiledFile], out: BinaryIO, deadline: Deadline
) -> dict[str, CompiledFile]:
    """Write an archive of these files; those that are in it: none that is gone, or is not what it was when listed.

    Raises:
        DeadlineError, OSError.
    """
    taken: dict[str, CompiledFile] = {}
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=out, compresslevel=LEVEL, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, listed in sorted(files.items()):
            _check(deadline)
            try:
                with open_regular(directory / name) as file:
                    before = _seen(file)
                    data, mode = file.read(), os.fstat(file.fileno()).st_mode
                    after = _seen(file)
            except OSError:
                continue
            if not before == after == listed or len(data) != listed.size:
                continue
            about = tarfile.TarInfo(name)
            about.size, about.mtime, about.mode = len(data), listed.mtime // 10**9, 0o600 | mode & 0o100
            about.pax_headers = {TIME: str(listed.mtime)}
            tar.addfile(about, _Slow(data, deadline))
            taken[name] = listed
    return taken


def _seen(file: BinaryIO) -> CompiledFile:
    found = os.fstat(file.fileno())
    return CompiledFile(found.st_size, found.st_mtime_ns)


class _Slow:
    """Bytes that are read no further than a deadline."""

    def __init__(self, data: bytes, deadline: Deadline) -> None:
        self.data, self.at, self.deadline = memoryview(data), 0, deadline

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        _check(self.deadline)
        end = len(self.data) if size < 0 else self.at + size
        found = bytes(self.data[self.at : end])
        self.at += len(found)
        return found


def unpack(file: BinaryIO, directory: Path, deadline: Deadline, most: int = MOST_BYTES) -> dict[str, CompiledFile]:
    """Put the files of an archive into a directory; those that are there stay.

    Returns:
        All that the archive has.

    Raises:
        Damaged: if it is no whole archive of plain files below FOLDERS; OSError: if a file cannot be written;
            DeadlineError.
    """
    for path in directory.glob(f"{HALF}*"):  # not a fresh one, of another process where no lock can be held
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > ABANDONED:
                shutil.rmtree(path, ignore_errors=True)
    half = Path(tempfile.mkdtemp(prefix=HALF, dir=directory))
    try:
        found = _extract(file, half, deadline, most)
        _place(half, directory, found)
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return found


def _extract(file: BinaryIO, half: Path, deadline: Deadline, most: int) -> dict[str, CompiledFile]:
    found: dict[str, CompiledFile] = {}
    total = 0
    try:
        with gzip.GzipFile(fileobj=file) as packed:
            with tarfile.open(fileobj=packed, mode="r|") as tar:
                for member in tar:
                    total += member.size
                    if total > most or len(found) >= MOST_FILES:
                        raise Damaged(f"it holds more than {most} bytes or {MOST_FILES} files")
                    _check_member(member, found)
                    source = tar.extractfile(member)
                    assert source is not None
                    found[member.name] = _write(half / member.name, source, member, deadline)
            while packed.read(CHUNK):  # to its end, where its checksum is
                _check(deadline)
    except Damaged:
        raise
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile, ValueError, ArithmeticError) as error:
        raise Damaged(str(error) or type(error).__name__) from error
    return found


def _check_member(member: tarfile.TarInfo, found: Mapping[str, CompiledFile]) -> None:
    """Damaged unless it is a regular file with a name as `listing` gives it."""
    name = PurePosixPath(member.name)
    plain = str(name) == member.name and not name.is_absolute() and ".." not in name.parts and "\0" not in member.name
    if not member.isreg() or member.issparse() or not plain or name.parts[0] not in FOLDERS or len(name.parts) < 2:
        raise Damaged(f"it holds {member.name[:200]!r}, which is no plain file of compiled code")
    if member.name in found:
        raise Damaged(f"it holds {member.name[:200]!r} twice")


def _write(path: Path, source: BinaryIO, member: tarfile.TarInfo, deadline: Deadline) -> CompiledFile:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600 | member.mode & 0o100)
    with open(number, "wb") as out:
        while data := source.read(CHUNK):
            _check(deadline)
            out.write(data)
    if path.stat().st_size != member.size:
        raise Damaged(f"{member.name[:200]!r} is cut off")
    told = member.pax_headers.get(TIME, str(int(member.mtime) * 10**9))
    if not A_TIME.fullmatch(told):
        raise Damaged(f"{member.name[:200]!r} has no time")
    os.utime(path, ns=(int(told), int(told)))
    return CompiledFile(member.size, int(told))


def _place(half: Path, directory: Path, names: Iterable[str]) -> None:
    """Move files that are not there yet to where they belong."""
    for name in names:
        path = directory / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.link(half / name, path)
        except FileExistsError:
            continue
        except OSError:  # a file system without hard links; who unpacks holds the directory's lock
            if not os.path.lexists(path):
                os.rename(half / name, path)


def _check(deadline: Deadline) -> None:
    if deadline.over:
        raise DeadlineError("it takes too long")
