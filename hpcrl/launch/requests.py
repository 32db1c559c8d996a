"""RUN/stop and RUN/cancel: what a user asks of a run from outside, and which of it a start has to heed.

A run takes a while to come up, a minute in some jobs, and says so; what is asked of it then is found when its launcher
has begun.

Invariant: a start heeds what was asked since it was, and nothing that was asked of a launcher before it; but what
nobody lived to answer holds for a start that no user asked for.  Times of files are compared with times of files alone:
the clocks of hosts differ.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from hpcrl.careful_files import Damaged, read_json
from hpcrl.run.job_file import JOB, read_job
from hpcrl.run.job_state import CANCEL, OVER, STATE, STOP, JobState


def process_age() -> float:
    """Seconds since this process began."""
    return max(0.0, time.time() - psutil.Process().create_time())


def forget_old_requests(root: Path, restarts: int, age: float) -> None:
    """Remove what was not asked of this start.

    restarts: how often the scheduler has started the job again by itself; age: seconds since this start was asked for,
    as far as its process knows: that of a job that `hpcrl submit` or `hpcrl resume` has sent is as old as its job.json.
    """
    os.utime(root / "lock")
    now = _changed(root / "lock")
    if (record := read_job(root)).queued and record.site is not None:
        age = max(age, now - _changed(root / JOB))
    for name in (STOP, CANCEL):
        asked = _changed(root / name)
        if _answered(root, asked) or (not restarts and asked < now - age):
            (root / name).unlink(missing_ok=True)


def _answered(root: Path, asked: float) -> bool:
    """Whether the launcher before has come to an end of its own after it was asked."""
    try:
        return read_json(root / STATE, JobState).phase in OVER and asked <= _changed(root / STATE)
    except (OSError, Damaged):
        return False


def _changed(path: Path) -> float:
    """Unix time by the clock of the file system; 0 where there is no such file."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
