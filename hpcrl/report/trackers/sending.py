"""RUN/sync.lock: one process at a time sends a run to trackers.

Invariants: what was sent is read and noted by the process that holds the lock, so that no record is sent twice where
locks count for all hosts; the kernel lets go of it however the process ends, and a file that is left says nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hpcrl.errors import DeadlineError
from hpcrl.report.progress import say
from hpcrl.utils.deadline import Deadline, poll
from hpcrl.utils.locks import try_lock
from hpcrl.utils.plain_text import strip_control
from hpcrl.utils.untrusted_files import open_append

LOCK = "sync.lock"
WAIT = 30.0  #: seconds for which another process may hold it
LOOK = 0.2  #: seconds between looks
LONGEST = 200  #: characters of the name of the one that sends


@contextlib.contextmanager
def sending(root: Path, seconds: float = WAIT) -> Iterator[None]:
    """Be the one that sends the run in `root`, within this context.

    Raises:
        DeadlineError: names the process that has been sending for longer than `seconds`.
    """
    with open_append(root / LOCK) as file:
        if not _taken(file, root):
            say(f"{_holder(file)} is sending {root}: waiting until it is done, {seconds:.0f} s at most")
            if not poll(lambda: _taken(file, root), Deadline(seconds), LOOK):
                raise DeadlineError(
                    f"{_holder(file)} has been sending {root} for {seconds:.0f} s: nothing was sent",
                    "call it again when that is done",
                )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        file.flush()
        yield


def _taken(file: BinaryIO, root: Path) -> bool:
    """Whether the lock is ours now; on a file system without locks, which is said, nothing is waited for."""

    def without(why: str) -> None:
        say(f"note: {root} cannot be locked ({why}): send it from nowhere else meanwhile")

    return try_lock(file, without)


def _holder(file: BinaryIO) -> str:
    file.seek(0)
    return strip_control(file.read(LONGEST).decode(errors="replace")).strip() or "another process"
