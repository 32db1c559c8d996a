"""The last word of rank 0, or of a rank that has lost it, to `hpcrl launch`: a line of what mpirun hands on from its ranks, so that it
does not matter on which machines they are.

Invariants: what mpirun says goes to the user as it comes, but for that line; nobody waits for an end of file, which processes that
outlive mpirun may hold off for ever.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
from typing import BinaryIO

ENVIRONMENT = "HPCRL_LAUNCH_WORD"  #: what the line begins with, drawn for each launch; absent: nobody listens
MARK = "hpcrl-launch-word"
BLOCK = 1 << 16  #: bytes taken at once


def drawn() -> str:
    return f"{MARK}-{os.urandom(8).hex()}"


def tell(status: int) -> None:
    """Say that the run is over with this exit status, and that nothing of it needs to be waited for."""
    if word := os.environ.get(ENVIRONMENT):
        with contextlib.suppress(OSError):
            os.write(2, f"{word} {status}\n".encode())


class Listener:
    """Passes on what a stream brings.  status: as the first told it, or None."""

    def __init__(self, stream: BinaryIO, word: str) -> None:
        self.status: int | None = None
        self._file, self._open, self._rest = stream.fileno(), True, b""
        self._line = re.compile(re.escape(word.encode()) + rb" (-?\d+)")

    def wait(self, seconds: float) -> bool:
        """Pass on what comes within `seconds`; whether something did, and more may follow."""
        ready = select.select([self._file] if self._open else [], [], [], seconds)[0]
        data = os.read(self._file, BLOCK) if ready else b""
        self._open &= bool(data or not ready)
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        said = [line for line in lines if not self._heard(line)]
        if not data and MARK.encode() not in self._rest:  # an unfinished line of one who waits
            said, self._rest = [*said, self._rest], b""
            _pass_on(b"\n".join(said))
        else:
            _pass_on(b"".join(line + b"\n" for line in said))
        return bool(data)

    def _heard(self, line: bytes) -> bool:
        if found := self._line.search(line):
            self.status = int(found[1]) if self.status is None else self.status
        return found is not None


def _pass_on(data: bytes) -> None:
    if data:
        with contextlib.suppress(OSError):  # nobody reads it any more: no reason to leave the run alone
            sys.stderr.flush()
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
