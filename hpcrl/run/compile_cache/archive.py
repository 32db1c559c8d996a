"""One archive of compiled code: a tar, compressed with gzip, in a directory of this user that all nodes see.

    DIRECTORY/            mode 0700
      SHAPE.tar.gz        mode 0600

What is in an archive will be run. Invariants: an archive is read only if it is a regular file that this user alone can
write; what is in it appears on the node only after its checksum held, and never in place of a file that is there; an
archive is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import stat
import tarfile
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from hpcrl.errors import HpcrlError
from hpcrl.run.gpu_environment import private_directory
from hpcrl.utils.untrusted_files import Damaged, make_parents, open_regular

#: the folders of a directory of compiled code that are packed.  Not the modules that a model brings along: these are
#: copies of its own files, and are to come from there
FOLDERS = ("vllm", "triton", "inductor", "flashinfer")
MOST_BYTES = 4 << 30  #: of all files of an archive
MOST_KEPT = 16 << 30  #: of all archives
CHUNK = 1 << 20
END = ".tar.gz"
ABANDONED = 3600.0  #: seconds after which what is half written is of a process that was killed
#: what only serves while something is compiled
PASSING_FOLDERS = {"locks", "__pycache__"}
PASSING_ENDS = (".lock", ".tmp", ".pyc")

Listing = Mapping[str, tuple[int, float]]  #: the name of a file in an archive -> (bytes, time of its last change)


def listing(directory: Path) -> Listing:
    """The files of a directory of compiled code that are worth packing, without links."""
    found = {}
    for folder in FOLDERS:
        for place, folders, names in os.walk(directory / folder):
            folders[:] = [name for name in folders if name not in PASSING_FOLDERS and not name.startswith("tmp")]
            for path in (Path(place, name) for name in names if not name.endswith(PASSING_ENDS)):
                with contextlib.suppress(OSError):
                    seen = path.lstat()
                    if stat.S_ISREG(seen.st_mode):
                        found[path.relative_to(directory).as_posix()] = seen.st_size, seen.st_mtime
    return found


def pack(directory: Path, kept: Path, shape: str) -> Listing | None:
    """Write the archive of a shape; what is in it, or None if a file has changed meanwhile, and nothing is written.

    Raises:
        OSError, HpcrlError: if that is not possible, or too large.
    """
    files = listing(directory)
    if (size := sum(size for size, _ in files.values())) > MOST_BYTES:
        raise HpcrlError(f"{size >> 20} MiB are more than the {MOST_BYTES >> 20} that an archive may have")
    make_parents(kept)
    if not private_directory(kept):
        raise HpcrlError(f"{kept} is accessible to others (chmod 700)")
    number, half = tempfile.mkstemp(prefix=".", suffix=END, dir=kept)
    try:
        with (
            contextlib.suppress(FileNotFoundError),  # a file has gone since: the listings differ
            open(number, "wb") as out,
            gzip.GzipFile(filename="", mode="wb", fileobj=out, compresslevel=1, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|") as tar,
        ):
            for name in sorted(files):
                tar.add(directory / name, name, filter=_plain)
        if listing(directory) != files:
            return None
        os.replace(half, kept / (shape + END))
    finally:
        Path(half).unlink(missing_ok=True)
    _trim(kept)
    return files


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without its owner, and with its time in whole seconds: ninja compares times, and a fraction would be rounded."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = int(member.mtime)
    return member


def unpack(directory: Path, kept: Path, shape: str) -> Listing:
    """Put the files of a shape's archive into a directory of the node; a folder that is there stays as it is.

    Raises:
        FileNotFoundError: if there is no archive; OSError: if a file cannot be read or written; Damaged: if it is no
            archive of plain files, or another user could have written it.
    """
    path = kept / (shape + END)
    if kept.exists() and not private_directory(kept):
        raise Damaged(f"{kept} is accessible to others (chmod 700)")
    half = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=directory))
    try:
        with open_regular(path) as file:
            seen = os.fstat(file.fileno())
            if seen.st_uid != os.getuid() or seen.st_mode & 0o022:
                raise Damaged(f"{path} is a file that others can change")
            try:
                with gzip.GzipFile(fileobj=file) as packed:
                    with tarfile.open(fileobj=packed, mode="r|") as tar:
                        for member in tar:  # Python 3.11.2 has no filter for this
                            _check_member(member)
                            tar.extract(member, half)
                    while packed.read(CHUNK):  # to its end, where its checksum is
                        pass
            except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile, ValueError, ArithmeticError) as error:
                path.unlink(missing_ok=True)
                raise Damaged(f"the archive is damaged, and removed: {error or type(error).__name__}") from error
        with contextlib.suppress(OSError):
            os.utime(path)
        found = listing(half)
        for folder in FOLDERS:
            with contextlib.suppress(OSError):  # another process of the node was first, or it is not in the archive
                os.rename(half / folder, directory / folder)
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return found


def _check_member(member: tarfile.TarInfo) -> None:
    """ValueError unless it is a regular file below one of FOLDERS; no other user may use it."""
    name = PurePosixPath(member.name)
    if not member.isreg() or name.is_absolute() or ".." in name.parts or name.parts[:1] not in {(f,) for f in FOLDERS}:
        raise ValueError(f"it holds {member.name[:200]!r}, which is not compiled code")
    member.mode = 0o600 | member.mode & 0o100


def _trim(kept: Path) -> None:
    """Remove archives beyond MOST_KEPT, those first that were used longest ago, and what killed processes have left."""
    total = 0
    with contextlib.suppress(OSError):
        for path in sorted(kept.glob(f"*{END}"), key=lambda path: -path.stat().st_mtime):
            total += path.stat().st_size
            late = time.time() - path.stat().st_mtime > ABANDONED
            if total > MOST_KEPT or (path.name.startswith(".") and late):
                path.unlink(missing_ok=True)
