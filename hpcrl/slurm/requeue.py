"""Queue a job of Slurm's again, for a process that watches a launcher which hangs.

    python -m hpcrl.slurm.requeue JOB

Invariant: it asks until Slurm answers, for PATIENCE seconds at most; the exit status is 0 where the job is queued
again, by this request or by Slurm itself.
"""

from __future__ import annotations

import sys

from hpcrl.errors import HpcrlError
from hpcrl.launch.allocation import AlreadyRequeued, SchedulerSilent
from hpcrl.launch.batch_run import AGAIN, PATIENCE
from hpcrl.slurm.batch_process import requeue
from hpcrl.toolbox.deadline import Deadline
from hpcrl.toolbox.retry import Pauses, retry


def main(job_id: str) -> int:
    """The command; its exit status."""
    try:
        retry(lambda: requeue(job_id), SchedulerSilent, Deadline(PATIENCE), Pauses(AGAIN, AGAIN))
    except AlreadyRequeued:
        return 0
    except HpcrlError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
