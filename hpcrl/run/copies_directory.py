"""Where the trainer ranks of a host keep copies of their state in its memory: a directory in /dev/shm, mode 0700.

    with copies_directory(wanted):      # a host's process, for as long as it lives
        ...                             # its ranks find it through the environment

Invariants: it outlives the ranks and the attempts of the process that made it, and nothing else: it goes when that
process ends, and with the next run of the user on the host if it was killed (`scratch.sweep`); one that was made above
us, and is this user's, is used and left there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hpcrl.errors import HpcrlError
from hpcrl.run.scratch import SHARED, Scratch, is_own_directory
from hpcrl.run.storage_errors import describe

COPIES = "HPCRL_COPIES"


def copies_here() -> Path | None:
    """The directory of this host's copies, or None if there is none."""
    given = os.environ.get(COPIES)
    return Path(given) if given and is_own_directory(Path(given)) else None


@contextlib.contextmanager
def copies_directory(wanted: bool) -> Iterator[None]:
    """Have such a directory while in the context, if it is wanted and there is none.

    Raises:
        HpcrlError: if it cannot be made.
    """
    if not wanted or copies_here() is not None:
        yield
        return
    try:
        made = Scratch("copies", SHARED)
    except OSError as error:
        raise HpcrlError(
            f"{SHARED} takes no copies of the trainer's state: {describe(error, SHARED)}",
            "leave out --non-persistent-save-interval",
        ) from error
    before = os.environ.get(COPIES)
    os.environ[COPIES] = str(made.path)
    try:
        yield
    finally:
        os.environ.pop(COPIES)
        if before is not None:
            os.environ[COPIES] = before
        made.remove()
