"""The words of rank 0, or of a rank that has lost it, to `hpcrl launch`: lines of what mpirun hands on from its ranks, so that it
does not matter on which machines they are.

Invariants: what mpirun says goes to the user as it comes, but for those lines; nobody waits for an end of file, which processes that
outlive mpirun may hold off for ever.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
from pathlib import Path
from typing import BinaryIO, NamedTuple

ENVIRONMENT = "HPCRL_LAUNCH_WORD"  #: what the line begins with, drawn for each launch; absent: nobody listens
MARK = "hpcrl-launch-word"
#: Open MPI's word on a host whose daemon it cannot reach any more; it ends the ranks within a second of it
LOST = re.compile(rb"^\s*Remote daemon:.* on node ([\w.-]+)\s*$")
BLOCK = 1 << 16  #: bytes taken at once


class Place(NamedTuple):
    """A run, and its directory, where that is seen."""

    identity: str
    root: Path


def drawn() -> str:
    return f"{MARK}-{os.urandom(8).hex()}"


def tell(status: int) -> None:
    """Say that the run is over with this exit status, and that nothing of it needs to be waited for."""
    _say(str(status))


def tell_where(root: Path, identity: str) -> None:
    """Say which run this is, and where: whoever outlives it may have something to add."""
    _say(f"is {identity} at {root}")


def _say(text: str) -> None:
    if word := os.environ.get(ENVIRONMENT):
        with contextlib.suppress(OSError):
            os.write(2, f"{word} ".encode() + os.fsencode(text) + b"\n")


class Listener:
    """Passes on what a stream brings.

    status, place: as the first told them, or None; lost: the first host that mpirun said it had lost, or "".
    """

    def __init__(self, stream: BinaryIO, word: str) -> None:
        self.status: int | None = None
        self.place: Place | None = None
        self.lost = ""
        self._file, self._open, self._rest = stream.fileno(), True, b""
        self._line = re.compile(re.escape(word.encode()) + rb" (?:(-?\d+)|is (\w+) at (.+))")

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
            if found[1] is not None:
                self.status = int(found[1]) if self.status is None else self.status
            else:
                self.place = self.place or Place(found[2].decode(), Path(os.fsdecode(found[3])))
        elif not self.lost and (gone := LOST.search(line)):
            self.lost = gone[1].decode()
        return found is not None


def _pass_on(data: bytes) -> None:
    if data:
        with contextlib.suppress(OSError):  # nobody reads it any more: no reason to leave the run alone
            sys.stderr.flush()
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
