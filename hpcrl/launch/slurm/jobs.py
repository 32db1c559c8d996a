"""Jobs in Slurm's queue, from a login node: look at them, cancel one, and whether this machine may submit.

Invariant: light to import: `hpcrl status` looks.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from hpcrl.errors import HpcrlError
from hpcrl.launch.slurm import node_events, squeue
from hpcrl.run.queued_job import JobKey, QueueAnswer


def query_jobs(jobs: Sequence[JobKey]) -> QueueAnswer:
    """Slurm's word on all these jobs, in one question.

    Never an error: where it is missing, slow or fails, a note says so.
    """
    return node_events.named(squeue.query_jobs(jobs))


def cancel(job_id: str) -> None:
    """End the job, or take it out of the queue.

    Raises:
        HpcrlError: with Slurm's words if it does not.
    """
    if not squeue.is_number(job_id):
        raise HpcrlError(f"{job_id} is not a Slurm job ID", "see squeue --me")
    answer = squeue.call(["scancel", job_id])
    if answer.code:
        raise HpcrlError(f"scancel {job_id}: {answer.last_output}", "see squeue")


def can_submit() -> bool:
    """Whether this machine has the command that submits."""
    return shutil.which("sbatch") is not None
