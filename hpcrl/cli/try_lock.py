"""Alone in making something that is kept: of two commands that want it at once one makes it, and the other waits."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from hpcrl.errors import DeadlineError
from hpcrl.utils.deadline import Deadline, poll
from hpcrl.utils.untrusted_files import open_append

POLL = 0.2


@contextlib.contextmanager
def alone(folder: Path, seconds: float) -> Iterator[None]:
    """In a directory.

    Raises:
        DeadlineError: if another has been at it for longer than it may take.
    """
    with open_append(folder / "lock") as file:

        def locked() -> bool:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        if not poll(locked, Deadline(seconds), POLL):
            raise DeadlineError(f"another process has been at it in {folder} for {seconds:.0f} s", "try again")
        yield
