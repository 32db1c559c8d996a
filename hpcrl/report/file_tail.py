"""The end of a file that may be long and may still grow: its last lines, and those that come.

Invariants: what is read does not grow with the length of the file, and each byte that comes is read once; a line counts
when its newline is there, so that half of one is never taken; a file that cannot be read has no lines, since it may
come yet.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from hpcrl.utils.untrusted_files import open_regular

BLOCK = 1 << 16  #: bytes read at once, backwards from the end
FARTHEST = 1 << 23  #: bytes that are looked at for the last lines, and that are taken at once of what has come


def last_lines(path: Path, count: int | None = None, within: int = FARTHEST) -> list[bytes]:
    """The last `count` lines (None: all) that are whole within the last `within` bytes of a file, without their
    newlines."""
    try:
        with open_regular(path) as file:
            return _backwards(file, file.seek(0, os.SEEK_END), count, within)[0]
    except OSError:
        return []


def end_of_text(path: Path) -> str:
    """The whole lines at the end of a log; "" if it cannot be read."""
    return b"\n".join(last_lines(path)).decode(errors="replace")


def _backwards(file: BinaryIO, end: int, count: int | None, within: int) -> tuple[list[bytes], bytes]:
    """(the lines, what follows the last newline) of a file of `end` bytes."""
    start = max(0, end - within)
    at = end
    blocks = list[bytes]()
    newlines = 0
    while at > start and (count is None or newlines <= count):
        size = min(BLOCK, at - start)
        at -= size
        file.seek(at)
        blocks.append(file.read(size))
        newlines += blocks[-1].count(b"\n")
    *lines, rest = b"".join(reversed(blocks)).split(b"\n")
    if at > 0:  # the first begins before what was read
        lines = lines[1:]
    return lines if count is None else lines[max(0, len(lines) - count) :], rest


class FileTail:
    """Follows one file.

    Attributes:
        rest: what follows the last newline that was seen.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rest = b""
        self._at = 0
        self._file = 0

    def last(self, count: int) -> list[bytes]:
        """The last `count` lines; what comes after them is left to `new`."""
        try:
            with open_regular(self.path) as file:
                self._file = os.fstat(file.fileno()).st_ino
                self._at = file.seek(0, os.SEEK_END)
                lines, self.rest = _backwards(file, self._at, count, FARTHEST)
        except OSError:
            return []
        return lines

    def new(self) -> list[bytes]:
        """The lines that have come; from the beginning if the file was cut or replaced."""
        try:
            with open_regular(self.path) as file:
                number = os.fstat(file.fileno()).st_ino
                if number != self._file or file.seek(0, os.SEEK_END) < self._at:
                    self._file = number
                    self._at = 0
                    self.rest = b""
                file.seek(self._at)
                data = file.read(FARTHEST)
        except OSError:
            return []
        self._at += len(data)
        *lines, self.rest = (self.rest + data).split(b"\n")
        return lines
