"""The file system in a SIF file, Apptainer's, unpacked by unsquashfs, or by Apptainer where that is not installed.

The file's form is that of the SIF specification (sif/pkg/sif: a header of 128 bytes, descriptors of 585 bytes, little
endian); its primary system partition holds a squashfs.

Invariant: the tools read a file system whose sizes were looked at before, and write below the directory that they are
given alone; what they leave are regular files, directories and links of this user's.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hpcrl.errors import DataError, HpcrlError
from hpcrl.sandbox.images.tree import MOST_BYTES, MOST_FILES

MAGIC = b"SIF_MAGIC\0"
MAGIC_AT = 32
_HEADER = struct.Struct("<32s10s3s3s16sqqqqqqqq")
_DESCRIPTOR = struct.Struct("<iBIIIqqqqqqq128s384s")
_PARTITION = struct.Struct("<ii")
_DATA, _SQUASHFS, _PRIMARY = 0x4004, 1, 2
_DESCRIPTORS = 4096
_SECONDS = 3600.0  #: that unpacking may take


class _Partition(NamedTuple):
    start: int
    size: int


def is_sif(path: Path) -> bool:
    """Whether a file is one of Apptainer's images.

    Raises:
        OSError: if it cannot be read.
    """
    with open(path, "rb") as file:
        file.seek(MAGIC_AT)
        return file.read(len(MAGIC)) == MAGIC


def _find(file: BinaryIO, name: str) -> _Partition:
    """Where the file system lies."""
    data = file.read(_HEADER.size)
    if len(data) == _HEADER.size:
        *_, total, at, length, _, _ = _HEADER.unpack(data)
        if 0 < total <= _DESCRIPTORS and at > 0 and total * _DESCRIPTOR.size <= length:
            file.seek(at)
            table = file.read(total * _DESCRIPTOR.size)
            for place in range(0, len(table) - _DESCRIPTOR.size + 1, _DESCRIPTOR.size):
                kind, used, _, _, _, start, size, *_, extra = _DESCRIPTOR.unpack_from(table, place)
                if used and kind == _DATA and _PARTITION.unpack_from(extra) == (_SQUASHFS, _PRIMARY):
                    if start <= 0 or size <= 0 or start + size > os.fstat(file.fileno()).st_size:
                        raise DataError(f"{name}: the file is cut off", "copy it again")
                    return _Partition(start, size)
    raise DataError(
        f"{name}: no squashfs is its primary system partition",
        "an encrypted image, and one of ext3, is not taken: build it again without",
    )


def unpack_sif(path: Path, root: Path, most_bytes: int = MOST_BYTES, most_files: int = MOST_FILES) -> None:
    """Unpack into a directory that is not there yet.

    Raises:
        DataError: if it is damaged, encrypted, or larger than an image may be.
        HpcrlError: if no program that can unpack it is installed.
    """
    with open(path, "rb") as file:
        partition = _find(file, str(path))
    if unsquashfs := shutil.which("unsquashfs"):
        _look(unsquashfs, path, partition, most_bytes, most_files)
        words = [unsquashfs, "-o", str(partition.start), "-no-progress", "-no-xattrs", "-d", str(root), str(path)]
        _run(words, root)
    elif apptainer := shutil.which("apptainer") or shutil.which("singularity"):
        _run([apptainer, "build", "--sandbox", str(root), str(path)], root)
    else:
        raise HpcrlError(
            f"{path}: neither unsquashfs nor apptainer is installed on this node to unpack it",
            "install squashfs-tools or Apptainer, or give an unpacked directory",
        )
    _tidy(root)


def _look(program: str, path: Path, partition: _Partition, most_bytes: int, most_files: int) -> None:
    """Add up the sizes that the file system says its files have, before anything of it is written."""
    words = [program, "-o", str(partition.start), "-lln", str(path)]
    files = 0
    size = 0
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as made:
        assert made.stdout is not None
        for line in made.stdout:
            cells = line.split(maxsplit=3)
            if len(cells) < 4 or cells[0][:1] not in b"-dlcbps":
                continue
            files += 1
            size += int(cells[2]) if cells[0].startswith(b"-") and cells[2].isdigit() else 0
            if files > most_files or size > most_bytes:
                made.kill()
                raise DataError(
                    f"{path} unpacks to more than {most_bytes:,} bytes, or {most_files:,} files",
                    "no image of that size is taken",
                )
    if not files:
        raise DataError(f"{path}: unsquashfs cannot read the file system in it", "copy the file again, or build it")


def _run(words: Sequence[str], root: Path) -> None:
    """Have a program unpack; what it cannot do for a user, as making devices, it leaves out."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"{words[-1]}: {words[0]} took more than {_SECONDS:g} s to unpack it", "try again") from None
    if "No space left" in done.stderr or "quota" in done.stderr:
        raise OSError(28, os.strerror(28))
    # 2: of an attribute or a device that a user may not have (unsquashfs(1)); the files are there
    if done.returncode not in (0, 2) or not root.is_dir():
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise DataError(
            f"{words[-1]}: {os.path.basename(words[0])} cannot unpack it: {said[0][:300]}", "build it again"
        )


def _tidy(root: Path) -> None:
    """Remove what is neither file, directory nor link, and rights that a box has no use for."""
    os.chmod(root, 0o755)
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if os.getuid() == 0:  # alone of all users it has unpacked files of others
                os.lchown(path, 0, 0)
            if stat.S_ISDIR(mode):
                os.chmod(path, stat.S_IMODE(mode) & 0o777 | 0o700)  # which is what lets this walk look into it
            elif stat.S_ISREG(mode):
                if mode & 0o7000:
                    os.chmod(path, mode & 0o777)
            elif not stat.S_ISLNK(mode):
                os.unlink(path)
