"""A run inside a Slurm job: what Slurm says of the job, and the batch process of it.

    python -m hpcrl.launch.slurm.batch_process RECIPE.toml --run-dir RUN [--option value ...]   what sbatch/*.sbatch run

Invariant: what Slurm is asked here is asked of this job alone; what a run does with the answers is in
hpcrl/launch/batch_run.py.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpcrl.errors import HpcrlError, Stopped
from hpcrl.launch.allocation import AlreadyRequeued, SchedulerSilent
from hpcrl.launch.batch_run import batch_main, run_in_job, stopped
from hpcrl.launch.job import reopen_job
from hpcrl.launch.slurm import node_events, squeue
from hpcrl.launch.slurm.srun import SrunHosts
from hpcrl.launch.slurm.steps import read_groups
from hpcrl.launch.user_code.snapshot import tell_changed_code
from hpcrl.plan import Host
from hpcrl.run.job_files import JobFile
from hpcrl.run.process import LATE, CommandResult, run_command

CALL = 30.0  #: seconds that scontrol may take
#: what Slurm says (slurm_errno.c) of a job that it is queueing again, or ending, already
UNDER_WAY = ("already completing", "pending execution", "job is completing")


class SlurmAllocation:
    """The Slurm job of this process (hpcrl.launch.allocation.Allocation)."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Raise UsageError if this is not a job, or the batch script is not hpcrl's."""
        groups = read_groups(environment)
        self.job_id = job_number(environment)
        self.restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
        again = self.restarts < int(environment.get("HPCRL_MAX_REQUEUES", "0"))
        self.backend = SrunHosts(groups, self.job_id, again)
        self.cluster = environment.get("SLURM_CLUSTER_NAME")

    def nodes(self) -> list[Host]:
        return self.backend.nodes()

    def ends(self) -> float | None:
        answer = squeue.call(["squeue", "--noheader", "--job", self.job_id, "--format=%e"])
        words = answer.out.split() if answer.code == 0 else []
        return float(words[0]) if words and words[0].isdigit() else None

    def preempted(self) -> bool:
        """While a job's GraceTime runs, its record has the time of its preemption, and its state is still RUNNING."""
        answer = squeue.call(["scontrol", "--oneliner", "show", "job", self.job_id])
        return answer.code == 0 and bool(re.search(r"\bPreemptTime=\d", answer.out))

    def failed(self, hosts: Sequence[str], since: float, until: float) -> dict[str, str]:
        return node_events.failures(hosts, since, until)

    def requeue(self) -> None:
        requeue(self.job_id)

    def leave_out(self, job_id: str, hosts: Sequence[str]) -> None:
        _scontrol("update", f"jobid={job_id}", f"excnodelist={','.join(hosts)}")

    def mark(self, identity: str, said: str = "") -> None:
        more = f" {' '.join(said.split())[:500]}" if said else ""
        _scontrol("update", f"jobid={self.job_id}", f"comment={squeue.MARK}{identity}{more}")

    def end_for_good(self) -> None:
        """Have the job end with this process, as it would be queued again, and held, where its requeue is expedited.

        Slurm counts any end with an error for one of the hardware, 25.11.0 to 25.11.2 any end at all.
        """
        answer = squeue.call(["scontrol", "--oneliner", "show", "job", self.job_id])
        if "ExpeditedRequeue=Yes" in answer.out and "JobState=RUNNING" in answer.out:
            _scontrol("update", f"jobid={self.job_id}", "requeue=0")

    def continue_elsewhere(self, root: Path, record: JobFile) -> str:
        from hpcrl.launch.slurm.submission import submit_elsewhere

        return submit_elsewhere(root, record)


def job_number(environment: Mapping[str, str]) -> str:
    """The number of the job around this process; ARRAY_TASK for a task of an array.

    The number that such a task has as a job is for one of them the array's own, by which Slurm means all tasks.
    """
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment["SLURM_JOB_ID"]


def requeue(job_id: str) -> None:
    """Queue a job again, once.

    Raises:
        AlreadyRequeued: if Slurm was faster.
        SchedulerSilent: if it did not answer; HpcrlError if it refuses.
    """
    answer = run_command(["scontrol", "requeue", job_id], CALL)
    if answer.code in (0, -signal.SIGTERM):  # the latter: Slurm has begun to end the job's processes, scontrol first
        return
    error = _failure(answer, "requeue", job_id)
    said = answer.err.lower()
    if any(words in said for words in UNDER_WAY):
        raise AlreadyRequeued(error.what)
    raise error if any(words in said for words in squeue.REFUSED) else SchedulerSilent(error.what, error.hint)


def _scontrol(*words: str) -> None:
    """HpcrlError with what scontrol said if it failed or did not answer."""
    answer = run_command(["scontrol", *words], CALL)
    if answer.code:
        raise _failure(answer, *words)


def _failure(answer: CommandResult, *words: str) -> HpcrlError:
    """What became of `scontrol WORDS` as an error."""
    hint = "is slurmctld up? see scontrol ping" if answer.code == LATE else ""
    return HpcrlError(f"scontrol {shlex.join(words)}: {' '.join(answer.err.split()) or answer.last_output}", hint)


def run_directory(root: str) -> dict[str, Any]:
    """What hpcrl submit has submitit call in the job: continue the run in the directory that it made, and say which
    files of custom functions have changed since it was submitted.

    A run that was stopped ends its job as it would end `hpcrl run`, so that accounting shows it, and no job that waits
    for its success begins.
    """
    allocation = SlurmAllocation()
    try:
        found = run_in_job(reopen_job(Path(root)), allocation, partial(tell_changed_code, Path(root)))
    finally:
        with contextlib.suppress(HpcrlError):
            allocation.end_for_good()
    if stopped(found):  # submitit keeps the result of what succeeds alone, and ends with 0 then
        atexit.register(os._exit, Stopped.exit_code)
    return found


if __name__ == "__main__":
    sys.exit(batch_main(sys.argv[1:], SlurmAllocation))
