"""A run whose mpirun has ended all of its ranks before any of them could say why, as it does when it loses a host.

Invariant: what was said of the run before stands behind the cause; of a run that is over, or another, nothing is
changed.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from hpcrl.careful_files import Damaged, read_json
from hpcrl.errors import HpcrlError
from hpcrl.launch.job import Job, reopen_job
from hpcrl.launch.restarts.lost_hosts import last_attempt, names
from hpcrl.mpi.exit_status_relay import RunLocation
from hpcrl.report.run_status import WORKING
from hpcrl.run.job_files import STATE, JobState, write_state


def explain_end(place: RunLocation, lost: Sequence[str], how: str, died: str = "") -> tuple[str, str]:
    """(what has happened, what to do); recorded as the error of the run at `place`, where this machine sees it.

    lost: hosts that mpirun or this machine cannot reach; how: mpirun ended; died: the host on which mpirun saw a rank
    die.
    """
    hosts = f"{'hosts' if lost[1:] else 'host'} {', '.join(lost)}"
    what = f"{hosts} cannot be reached any more, and mpirun {how}" if lost else f"mpirun {how} before the run was over"
    if died and not lost:
        what = f"host {died}: its MPI rank died before the run was over, and mpirun {how}"
    with contextlib.suppress(OSError, HpcrlError):
        if (job := reopen_job(place.root)).identity == place.identity:  # and not another's of that name
            _record(job, lost, what)
    again = f"hpcrl launch --resume {place.root} --hostfile FILE"
    if lost:
        return what, f"is it up, and its network? go on without it, or when it is back: {again}"
    return what, f"what it started has ended with it; its own words are above; go on with {again}"


def _record(job: Job, lost: Sequence[str], what: str) -> None:
    rundir = last_attempt(job)
    if rundir is None:
        return
    first = rundir.failure()
    if first is None or (lost and (first.role != "launcher" or not all(names(first, host) for host in lost))):
        rundir.correct(f"{what} (first seen as: {first})" if first else what)
    try:
        state = read_json(job.root / STATE, JobState)
    except Damaged:
        return
    if state.phase in WORKING:  # the launcher had no time to say how it ended
        write_state(
            job.root, JobState("failed", time.time(), attempt=rundir.attempt, message=what, host=socket.gethostname())
        )
