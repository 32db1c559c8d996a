"""Hosts that the scheduler lost under an attempt: their names stand as its error, whatever those said first who were
ended with them.

Invariant: a host is named only where the scheduler says that it failed while the attempt was at work, or so soon after
the launcher's last word that it had not noticed yet.
"""

from __future__ import annotations

import re
from pathlib import Path

from hpcrl.careful_files import Damaged, read_json
from hpcrl.errors import HpcrlError
from hpcrl.launch.job import Job, finished, say
from hpcrl.launch.scheduler import Allocation
from hpcrl.plan import Host
from hpcrl.run.job_files import STATE, JobState
from hpcrl.run.rundir import HOSTS, AttemptFailure, RunDir

#: seconds that a scheduler may take to notice a host's end: Slurm's SlurmdTimeout is 300 by default, 600 at some sites
UNNOTICED = 900.0


def last_attempt(job: Job) -> RunDir | None:
    """Of the stage at work; None if it has not begun."""
    stage = next((stage for stage in job.recipe.stages if not finished(job.directory(stage))), None)
    begun = stage is not None and (job.directory(stage) / "options.json").is_file()
    return RunDir.latest(job.directory(stage)) if stage is not None and begun else None


def correct(job: Job, why: str) -> None:
    """Have the cause stand as the last attempt's error, which was seen by those who lost a peer."""
    if (rundir := last_attempt(job)) is not None:
        rundir.correct(why)


def names(error: AttemptFailure, host: str) -> bool:
    """Whether an error names this host, and not one whose name begins or ends so."""
    return re.search(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", error.message) is not None


def lost_hosts(rundir: RunDir | None, allocation: Allocation, until: float = float("inf")) -> dict[str, str]:
    """host -> `host node1 was lost (what the scheduler says)`, of the hosts of an attempt that failed while it ran, or
    after it and before `until` (unix time)."""
    if rundir is None:
        return {}
    file = rundir.here / HOSTS
    try:
        since, hosts = file.stat().st_mtime, read_json(file, list[Host])
    except (OSError, Damaged):
        return {}  # it had no hosts yet
    found = allocation.failed([host.name for host in hosts], since, until)
    return {name: f"host {name} was lost ({said})" for name, said in found.items()}


def explain_last_end(job: Job, allocation: Allocation) -> None:
    """Where the launcher before us could not say how its attempt ended, have the host that was lost stand as its error.

    It may have been on that host; or the scheduler, which was faster, has ended it with the others.
    """
    rundir, state = last_attempt(job), _state(job.root)
    if rundir is None or state is None or state.phase in ("requeued", "finished", "cancelled"):
        return
    if state.phase in ("failed", "stopped") and allocation.restarts <= state.restarts:
        return  # that was the end of its job, and it has seen to the words
    try:
        first = rundir.failure()
    except HpcrlError:  # damaged
        first = None
    if state.phase == "stopped" and first is None:
        return
    lost = lost_hosts(rundir, allocation, state.time + UNNOTICED)
    if not lost or (first and first.role == "launcher" and all(names(first, host) for host in lost)):
        return
    why = ", ".join(lost.values()) + (f" (first seen as: {first})" if first else "")
    rundir.correct(why)
    say(f"attempt {rundir.attempt} has ended: {why}")


def _state(root: Path) -> JobState | None:
    try:
        return read_json(root / STATE, JobState)
    except (OSError, Damaged):
        return None
