"""JOB/state.json: what a job is doing, for whoever looks from outside.

Invariant: written whole, at each change and at least every BEAT seconds while the launcher lives, so that an old file
of a job that should be running means that its launcher is gone; the last one says how the job ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from hpcrl.errors import HpcrlError, Stopped
from hpcrl.run.rundir import write_atomic

STATE = "state.json"  #: its name in a run directory
BEAT = 10.0
STOP = "stop"  #: RUN/stop is there once the run was asked to save and end
CANCEL = (
    "cancel"  #: JOB/cancel is there while a job is being ended by hand: whatever the launcher sees then is no failure
)
CANCELLED = "cancelled; what was saved is good"

Phase = Literal["preparing", "starting", "running", "saving", "requeued", "finished", "stopped", "failed", "cancelled"]
OVER = ("finished", "stopped", "failed", "cancelled")  #: those after which its launcher does nothing more


class JobState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What it holds, the launcher's word.

    time: when it was written; ends: the allocation's time limit (unix times); restarts: how often the scheduler has
    started the job again; host, pid: the launcher's; message: how it ended, or why it waits.
    """

    phase: Phase
    time: float
    stage: str = ""
    attempt: int = 0
    restarts: int = 0
    message: str = ""
    host: str = ""
    pid: int = 0
    ends: float | None = None


def write_state(root: Path, state: JobState) -> None:
    """Write it.  A full disk is told by those who need it: no error is raised."""
    with contextlib.suppress(OSError, HpcrlError):
        write_atomic(root / STATE, msgspec.json.encode(state))


class JobStateFile:
    """The writer of state.json, as a context: leaving it says whether the job finished, stopped, failed or was
    cancelled."""

    def __init__(self, root: Path, restarts: int = 0, ends: float | None = None) -> None:
        self.root = root
        self._written = 0.0  # by a clock that nobody sets back
        self.state = JobState("starting", 0.0, restarts=restarts, host=socket.gethostname(), pid=os.getpid(), ends=ends)

    @property
    def phase(self) -> Phase:
        return self.state.phase

    def set(self, phase: Phase, **fields: Any) -> None:
        """Change the phase, and what else is given of JobState's fields."""
        self.state = msgspec.structs.replace(self.state, phase=phase, **fields)
        self._write()

    def beat(self, phase: Phase | None = None) -> None:
        """A sign of life, and perhaps a new phase; cheap to call often."""
        if phase is not None and phase != self.phase:
            self.set(phase)
        elif time.monotonic() - self._written > BEAT:
            self._write()

    def _write(self) -> None:
        self.state = msgspec.structs.replace(self.state, time=time.time())
        self._written = time.monotonic()
        write_state(self.root, self.state)

    def __enter__(self) -> JobStateFile:
        self._write()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.set("finished", message="")
        elif (self.root / CANCEL).exists():
            self.set("cancelled", message=CANCELLED)
        elif isinstance(error, Stopped):
            self.set("stopped", message=str(error))
        else:
            self.set("failed", message=str(error) or type(error).__name__)
