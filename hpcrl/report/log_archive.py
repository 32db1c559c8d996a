"""The logs of an attempt that is long over, in one file: logs/attempt-N.tar.gz, which tar reads as well.

Invariants: the directory of an attempt's logs goes only once the archive with all of it is whole, on disk and in its
place; of an archive nothing is unpacked to disk, and no more is read than a run's logs may have.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hpcrl.report.file_tail import BLOCK, FARTHEST
from hpcrl.untrusted_files import open_append, open_regular

FAST = 1  #: level of gzip: logs shrink to a tenth, at some 100 MB a second
MOST = 1 << 34  #: bytes of logs that are read from an archive


def archive_of(folder: Path) -> Path:
    """Where the logs of logs/attempt-N are once they are packed."""
    return folder.with_name(f"{folder.name}.tar.gz")


def pack_logs(folder: Path) -> None:
    """Put the logs of an attempt into one file, and remove their directory.

    Raises:
        OSError: then the directory is still there; one that was packed before is removed.
    """
    with packed_into(archive_of(folder), folder) as out:
        if out is not None:
            with tarfile.open(fileobj=out, mode="w:gz", compresslevel=FAST) as packed:
                for name in sorted(os.listdir(folder)):
                    packed.add(folder / name, f"{folder.name}/{name}")


@contextlib.contextmanager
def packed_into(place: Path, folder: Path) -> Iterator[IO[bytes] | None]:
    """A file for all of a directory, which is removed once the file is whole, on disk and at `place`; None if it is
    there already.  OSError: then the directory is still there."""
    if place.exists():
        yield None
    else:
        beside = place.with_name(f".{place.name}.{os.getpid()}")
        beside.unlink(missing_ok=True)
        try:
            with open_append(beside) as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            beside.replace(place)
        finally:
            beside.unlink(missing_ok=True)
    shutil.rmtree(folder)


def archived_lines(archive: Path, count: int) -> dict[str, list[bytes]]:
    """The last `count` lines of every log in an archive, by the log's name; none if it cannot be read."""
    found = dict[str, list[bytes]]()
    left = MOST
    try:
        with open_regular(archive) as file, tarfile.open(fileobj=file, mode="r|gz") as packed:
            for member in packed:
                left -= member.size
                if left < 0:
                    break
                if member.isfile() and (data := packed.extractfile(member)) is not None:
                    blocks = deque(iter(lambda: data.read(BLOCK), b""), maxlen=FARTHEST // BLOCK)
                    lines = b"".join(blocks).removesuffix(b"\n").split(b"\n")
                    found[Path(member.name).name] = lines[max(0, len(lines) - count) :]
    except (OSError, EOFError, tarfile.TarError):
        return found
    return found
