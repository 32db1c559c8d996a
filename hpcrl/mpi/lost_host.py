"""A host that mpirun has lost: it ends all ranks at once then, and nobody of the run may have had the time to say why.

Invariant: what was said of the run before stands behind the host's name; of a run that is over, nothing is changed.
"""

from __future__ import annotations

import contextlib
import socket
import time

from hpcrl.careful_files import Damaged, read_json
from hpcrl.errors import HpcrlError
from hpcrl.launch.job import Job, reopen_job
from hpcrl.launch.restarts.lost_hosts import last_attempt
from hpcrl.mpi.last_word import Place
from hpcrl.report.run_status import WORKING
from hpcrl.run.job_state import STATE, JobState, write_state


def lost_host(host: str, place: Place | None) -> tuple[str, str]:
    """(what has happened, what to do); recorded as the error of the run at `place`, where this machine sees it."""
    what = f"host {host} was lost: mpirun cannot reach its daemon there any more"
    with contextlib.suppress(OSError, HpcrlError):
        if place is not None and (job := reopen_job(place.root)).identity == place.identity:  # and not another's of that name
            _record(job, host, what)
    again = f"hpcrl launch --resume {place.root if place else 'RUN'} --hostfile FILE"
    return what, f"is it up, and its network? go on without it, or when it is back: {again}"


def _record(job: Job, host: str, what: str) -> None:
    rundir = last_attempt(job)
    if rundir is None:
        return
    first = rundir.failure()
    if first is None or first.role != "launcher" or f"host {host}" not in first.message:
        rundir.correct(f"{what} (first seen as: {first})" if first else what)
    try:
        state = read_json(job.root / STATE, JobState)
    except Damaged:
        return
    if state.phase in WORKING:  # the launcher had no time to say how it ended
        write_state(job.root, JobState("failed", time.time(), attempt=rundir.attempt, message=what, host=socket.gethostname()))
