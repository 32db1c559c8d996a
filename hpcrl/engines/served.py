"""An engine that is kept from one use to the next: it ends once its file has not been touched for a while.

Invariant: both sides set and read the file's time by the clock of their host, which is the same.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from hpcrl.untrusted_files import touch

#: environment variables of such an engine: its file, and how many seconds it may go unused
USED_FILE = "HPCRL_ENGINE_USED_FILE"
IDLE_SECONDS = "HPCRL_ENGINE_IDLE_SECONDS"


def note_use(path: Path) -> None:
    """It is used now."""
    touch(path)
    now = time.time()
    os.utime(path, (now, now))


def unused(environment: os._Environ[str] = os.environ) -> bool:
    """Whether this engine is such a one, and has not been used for too long; so is one whose file is gone."""
    path, seconds = environment.get(USED_FILE), environment.get(IDLE_SECONDS)
    if path is None or seconds is None:
        return False
    with contextlib.suppress(OSError):
        return time.time() - Path(path).stat().st_mtime > float(seconds)
    return True
