"""Whether a run continues after an attempt, in which job, and which hosts the scheduler lost.

Invariants: the time kept for saving before a limit is never less than the floor.  A host is called lost only where
the scheduler says that it failed while the attempt was running, or so soon after the launcher's last word that it had
not noticed yet.  job.json names the jobs of a chain, and as the run's job the one that runs or is next; a job of a
chain whose run is done, or was stopped or cancelled by its user, ends at once and starts nothing.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.launch.allocation import Allocation
from hpcrl.launch.broken_hosts import find_broken_host
from hpcrl.launch.job import RunJob, finished
from hpcrl.plan import Host
from hpcrl.report.metrics import last_records
from hpcrl.report.progress import say
from hpcrl.run.job_files import CANCEL, STATE, STOP, JobFile, JobState, read_job, replace_job
from hpcrl.run.role import read_plan
from hpcrl.run.rundir import HOSTS, AttemptFailure, RunDir, read_if_whole

RECENT = 20  #: records that an estimate looks back on
SLACK = 15.0  #: seconds for everything but the step and the save


def margin(rundir: RunDir, floor: float) -> float:
    """Seconds before the time limit at which to stop: two steps, the slowest save, and slack; at least `floor`."""
    rows = last_records(rundir.metrics_file, RECENT)
    step = [row["perf/step_time"] for row in rows if "perf/step_time" in row]
    save = [row["perf/save_time"] for row in rows if "perf/save_time" in row]
    measured = 2 * statistics.median(step) + max(save, default=0.0) + SLACK if step else 0.0
    return max(floor, measured)


# ---- hosts that the scheduler lost

#: seconds that a scheduler may take to notice a host's end: Slurm's SlurmdTimeout is 300 by default, 600 at some sites
UNNOTICED = 900.0


def last_attempt(job: RunJob) -> RunDir | None:
    """Of the stage at work; None if it has not begun."""
    stage = next((stage for stage in job.recipe.stages if not finished(job.directory(stage))), None)
    begun = stage is not None and (job.directory(stage) / "options.json").is_file()
    return RunDir.latest(job.directory(stage)) if stage is not None and begun else None


def seen_broken(job: RunJob) -> tuple[str, str] | None:
    """(host, what was seen) if the last attempt failed on hardware."""
    rundir = last_attempt(job)
    if rundir is None or not rundir.plan_file.is_file():
        return None
    try:
        return find_broken_host(rundir, read_plan(rundir))
    except HpcrlError:  # no plan to read: the failure's own words stand
        return None


def correct_error(job: RunJob, why: str) -> None:
    """Record the cause as the last attempt's error, which was seen by those who lost a peer."""
    if (rundir := last_attempt(job)) is not None:
        rundir.correct(why)


def names_host(error: AttemptFailure, host: str) -> bool:
    """Whether an error names this host, and not one whose name begins or ends so."""
    return re.search(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", error.message) is not None


def lost_hosts(rundir: RunDir | None, allocation: Allocation, until: float = float("inf")) -> dict[str, str]:
    """host -> `host node1 was lost (what the scheduler says)`, of the hosts of an attempt that failed while it ran, or
    after it and before `until` (unix time)."""
    if rundir is None:
        return {}
    try:
        began, hosts = (rundir.here / HOSTS).stat().st_mtime, read_if_whole(rundir.here / HOSTS, list[Host])
    except OSError:
        return {}
    found = allocation.failed([host.name for host in hosts or ()], began, until)
    return {name: f"host {name} was lost ({said})" for name, said in found.items()}


def explain_last_end(job: RunJob, allocation: Allocation) -> None:
    """Where the launcher before us could not say how its attempt ended, record the lost host as its error.

    It may have been on that host; or the scheduler, which was faster, has ended it with the others.
    """
    rundir, state = last_attempt(job), read_if_whole(job.root / STATE, JobState)
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
    if not lost or (first and first.role == "launcher" and all(names_host(first, host) for host in lost)):
        return
    why = ", ".join(lost.values()) + (f" (first seen as: {first})" if first else "")
    rundir.correct(why)
    say(f"attempt {rundir.attempt} has ended: {why}")


# ---- a chain of jobs


def later_jobs(record: JobFile) -> tuple[str, ...]:
    """The jobs of the chain after the run's present one."""
    ids = record.chain
    return tuple(ids[ids.index(record.job_id) + 1 :]) if record.job_id in ids else ()


def place_in_chain(record: JobFile, job_id: str) -> int:
    """How many jobs of the chain come before this one; 0 for a job of no chain."""
    return record.chain.index(job_id) if job_id in record.chain else 0


def nothing_left_to_do(job: RunJob, job_id: str) -> str:
    """Why this job of the chain has nothing to do, "" if it has; then it is the run's job from now on."""
    record = read_job(job.root)
    if not place_in_chain(record, job_id):
        return ""
    if all(finished(job.directory(stage)) for stage in job.recipe.stages):
        return "the run is finished"
    for name, why in ((STOP, "it was stopped with hpcrl stop"), (CANCEL, "it was cancelled")):
        if (job.root / name).exists():
            return f"{why}; hpcrl resume {job.root} continues"
    replace_job(job.root, msgspec.structs.replace(record, job_id=job_id))
    return ""


def hand_over(root: Path, job_id: str) -> str | None:
    """Make the job after `job_id` the run's; its number, None where there is none."""
    record = read_job(root)
    following = later_jobs(msgspec.structs.replace(record, job_id=job_id))
    if not following:
        return None
    replace_job(root, msgspec.structs.replace(record, job_id=following[0]))
    return following[0]
