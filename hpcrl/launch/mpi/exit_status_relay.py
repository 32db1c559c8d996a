"""The words of rank 0, or of a rank that has lost it, to `hpcrl launch`: lines of what mpirun hands on from its ranks,
so that it does not matter on which machines they are.

Invariants: what mpirun says goes to the user as it comes, except those lines; no one waits for an end of file, which
processes that outlive mpirun may hold off for ever.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from pathlib import Path
from typing import BinaryIO, NamedTuple

ENVIRONMENT = "HPCRL_LAUNCH_WORD"  #: what the line begins with, drawn for each launch; absent: no listener
ASKED = "HPCRL_LAUNCH_ASKED"  #: when `hpcrl launch` began, unix time by its host's clock
MARK = "hpcrl-launch-word"
#: Open MPI's word on a host whose daemon it cannot reach any more; it ends the ranks within a second of it
LOST = re.compile(rb"^\s*Remote daemon:.* on node ([\w.-]+)\s*$")
#: and the words of Open MPI and of MPICH on a rank that died
DIED = re.compile(rb"process rank \d+ with PID \d+ on node ([\w.-]+) exited on signal|^= +PID \d+ RUNNING AT ([\w.-]+)")
BLOCK = 1 << 16  #: bytes taken at once


class RunLocation(NamedTuple):
    """A run, and its directory, where that is seen."""

    identity: str
    root: Path


def drawn() -> str:
    return f"{MARK}-{os.urandom(8).hex()}"


def age() -> float:
    """Seconds since `hpcrl launch` began, 0 where it did not call us."""
    return max(0.0, time.time() - float(os.environ.get(ASKED, "inf")))


def tell(status: int) -> None:
    """Say that the run is over with this exit status, and that nothing of it needs to be waited for."""
    _say(str(status))


def tell_where(root: Path, identity: str) -> None:
    """Say which run this is, and where: a process that outlives it may have something to add."""
    _say(f"is {identity} at {root}")


def _say(text: str) -> None:
    if word := os.environ.get(ENVIRONMENT):
        with contextlib.suppress(OSError):
            os.write(2, f"{word} ".encode() + os.fsencode(text) + b"\n")


class OutputRelay:
    """Passes on what mpirun's output and errors bring.

    Attributes:
        status, place: as the first told them, or None.
        lost, died: the first host that mpirun said it had lost, or on which a rank had died, or "".
    """

    def __init__(self, out: BinaryIO, errors: BinaryIO, word: str) -> None:
        self.status: int | None = None
        self.place: RunLocation | None = None
        self.lost = self.died = ""
        self._open = {errors.fileno(): sys.stderr, out.fileno(): sys.stdout}
        self._rest = dict.fromkeys(self._open, b"")  #: the beginning of a line whose end has not come yet
        self._line = re.compile(re.escape(word.encode()) + rb" (?:(-?\d+)|is (\w+) at (.+))")

    def wait(self, seconds: float) -> bool:
        """Pass on what comes within `seconds`; whether something did, and more may follow."""
        ready = select.select(list(self._open), [], [], seconds)[0]
        some = False
        for number, to in list(self._open.items()):
            data = os.read(number, BLOCK) if number in ready else b""
            some |= bool(data)
            *lines, rest = (self._rest[number] + data).split(b"\n")
            said = b"".join(line + b"\n" for line in lines if not self._heard(line))
            if not data and MARK.encode() not in rest:  # an unfinished line of one who waits
                said, rest = said + rest, b""
            self._rest[number] = rest
            with contextlib.suppress(OSError):  # there is no reader any more: no reason to leave the run alone
                to.flush()
                to.buffer.write(said)
                to.buffer.flush()
            if number in ready and not data:
                del self._open[number]
        return some

    def _heard(self, line: bytes) -> bool:
        """Whether it is for us alone."""
        if found := self._line.search(line):
            if found[1] is None:
                self.place = self.place or RunLocation(found[2].decode(), Path(os.fsdecode(found[3])))
            elif self.status is None:
                self.status = int(found[1])
        elif gone := LOST.search(line):
            self.lost = self.lost or gone[1].decode()
        elif gone := DIED.search(line):
            self.died = self.died or (gone[1] or gone[2]).decode()
        return found is not None
