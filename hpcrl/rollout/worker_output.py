"""What a confined worker writes: a thread copies it from a pipe to this process's standard error.

Invariant: the worker has the log itself not open, of which it could read, change or cut all that others wrote; the
thread ends with the worker, which alone can write to the pipe.
"""

from __future__ import annotations

import os
import threading
from typing import IO

AT_ONCE = 1 << 16  #: bytes


def copy_output(pipe: IO[bytes]) -> None:
    """Copy until nothing can write to it any more; returns at once."""
    threading.Thread(target=_copy, args=(pipe,), name="worker output", daemon=True).start()


def _copy(pipe: IO[bytes]) -> None:
    with pipe:
        while data := os.read(pipe.fileno(), AT_ONCE):
            while data:
                data = data[os.write(2, data) :]
