"""A run as a chain of jobs, for sites that do not queue a job again: each starts when the one before has ended,
however.

Invariants: job.json names the jobs of the chain, and as the run's job the one that runs or is next; a job whose run is
done, or was stopped or cancelled by its user, ends at once and starts nothing.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcrl.launch.job import Job, finished
from hpcrl.run.job_files import CANCEL, STOP, JobFile, read_job, replace_job


def later(record: JobFile) -> tuple[str, ...]:
    """The jobs of the chain after the run's present one."""
    ids = record.chain
    return tuple(ids[ids.index(record.job_id) + 1 :]) if record.job_id in ids else ()


def place(record: JobFile, job_id: str) -> int:
    """How many jobs of the chain come before this one; 0 for a job of no chain."""
    return record.chain.index(job_id) if job_id in record.chain else 0


def needless(job: Job, job_id: str) -> str:
    """Why this job of the chain has nothing to do, "" if it has; then it is the run's job from now on."""
    record = read_job(job.root)
    if not place(record, job_id):
        return ""
    if all(finished(job.directory(stage)) for stage in job.recipe.stages):
        return "the run is finished"
    for name, why in ((STOP, "it was stopped with hpcrl stop"), (CANCEL, "it was cancelled")):
        if (job.root / name).exists():
            return f"{why}; hpcrl resume {job.root} goes on"
    replace_job(job.root, msgspec.structs.replace(record, job_id=job_id))
    return ""


def hand_over(root: Path, job_id: str) -> str | None:
    """Make the job after `job_id` the run's; its number, None where there is none."""
    record = read_job(root)
    following = later(msgspec.structs.replace(record, job_id=job_id))
    if not following:
        return None
    replace_job(root, msgspec.structs.replace(record, job_id=following[0]))
    return following[0]
