"""Locks on files, between processes: the kernel lets go of them however their holders end."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from typing import BinaryIO


def try_lock(file: BinaryIO, without: Callable[[str], None]) -> bool:
    """Whether the lock of an open file is ours now, or its file system has none.

    Args:
        without: called with the reason where its file system has none.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        without(error.strerror)
    return True
