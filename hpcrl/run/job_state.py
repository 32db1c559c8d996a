"""JOB/state.json: what a job is doing, for whoever looks from outside.

Invariant: written whole, at each change and at least every BEAT seconds while the launcher lives, so that an old file of a
job that should be running means that its launcher is gone; the last one says how the job ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from hpcrl.errors import HpcrlError, Stopped
from hpcrl.run.rundir import write_atomic

BEAT = 10.0
CANCEL = "cancel"  #: JOB/cancel is there while a job is being ended by hand: whatever the launcher sees then is no failure
CANCELLED = "cancelled; what was saved is good"


class JobStateFile:
    """The writer of state.json, as a context: leaving it says whether the job finished, stopped, failed or was cancelled."""

    def __init__(self, root: Path, restarts: int = 0, ends: float | None = None) -> None:
        self.path, self.written = root / "state.json", 0.0
        self.fields: dict[str, Any] = {
            "phase": "starting",
            "stage": "",
            "attempt": 0,
            "restarts": restarts,
            "message": "",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "ends": ends,
        }

    @property
    def phase(self) -> str:
        return self.fields["phase"]

    def set(self, phase: str, **fields: Any) -> None:
        """Change the phase, and what else is given."""
        self.fields |= {"phase": phase, **fields}
        self._write()

    def beat(self, phase: str | None = None) -> None:
        """A sign of life, and perhaps a new phase; cheap to call often."""
        if phase is not None and phase != self.phase:
            self.set(phase)
        elif time.time() - self.written > BEAT:
            self._write()

    def _write(self) -> None:
        self.written = time.time()
        with contextlib.suppress(OSError, HpcrlError):  # a full disk is told by those who need it
            write_atomic(self.path, msgspec.json.encode(self.fields | {"time": self.written}))

    def __enter__(self) -> JobStateFile:
        self._write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.set("finished", message="")
        elif (self.path.parent / CANCEL).exists():
            self.set("cancelled", message=CANCELLED)
        elif isinstance(error, Stopped):
            self.set("stopped", message=str(error))
        else:
            self.set("failed", message=str(error) or type(error).__name__)
