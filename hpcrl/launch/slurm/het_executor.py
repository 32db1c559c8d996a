"""submitit for heterogeneous jobs: `executor.submit(function, ...)` starts one job of several components.

submitit writes the call to a file and runs it in the job; what it lacks is `#SBATCH hetjob`, a batch process that
itself starts the steps (its own script puts the call under srun), and a reading of sacct's `1234+0` ids.  Invariant:
the job that comes back has submitit's state, stdout, result and cancel, and its state is that of the component that is
worst off.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

__all__ = ["FailedJobError", "HetSlurmExecutor"]

ANSWER = 120  #: seconds that sbatch may take, which is longer than it tries to reach its controller
_HET_ID = re.compile(r"(\d+)\+\d+")
#: from worst to best: the first of these that a component is in is the job's
_ORDER = (
    *("NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "FAILED", "DEADLINE", "TIMEOUT", "CANCELLED", "PREEMPTED", "REQUEUED"),
    *("PENDING", "CONFIGURING", "SUSPENDED", "RESIZING", "COMPLETING", "RUNNING", "COMPLETED"),
)


class HetWatcher(SlurmInfoWatcher):
    """sacct's rows, with those of a heterogeneous job's components put together under the leader's id."""

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        text = string if isinstance(string, str) else string.decode()
        head, *rows = text.splitlines() or [""]
        names = head.split("|")
        plain, components = [], {}
        for row in rows:
            values = dict(zip(names, row.split("|"), strict=False))
            if match := _HET_ID.fullmatch(values.get("JobID", "")):
                components.setdefault(match[1], []).append(values)
            elif "+" not in values.get("JobID", ""):
                plain.append(row)
        found = super().read_info("\n".join([head, *plain]))
        return found | {leader: _together(leader, parts) for leader, parts in components.items()}


def _together(leader: str, parts: list[dict[str, str]]) -> dict[str, str]:
    states = [part["State"].split(" ")[0] for part in parts]
    worst = next((state for state in _ORDER if state in states), states[0])
    return {"JobID": leader, "State": worst, "NodeList": ",".join(part["NodeList"] for part in parts)}


def of_another_job(environment: Mapping[str, str]) -> list[str]:
    """The variables by which a job, or an MPI program, around this process would change what sbatch and the new job
    do."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return [name for name in environment if name.startswith(("SLURM_", "PMI_", "PMIX_", "OMPI_")) and name not in kept]


class HetJob(SlurmJob):
    """A submitted job; its one result is the batch process's."""

    watcher = HetWatcher(delay_s=5)


class HetSlurmExecutor(SlurmExecutor):
    """Submits calls as jobs whose batch script `script` renders.

    Attributes:
        sent: the number of the job that sbatch has taken, "" before.
        script: from the shell text of the command (which runs the call) to the whole of the batch script.
    """

    job_class = HetJob

    def __init__(self, folder: Path | str, script: Callable[[str], str], **kwargs: Any) -> None:
        super().__init__(folder, **kwargs)
        self._script = script
        self.sent = ""

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script(f"env SUBMITIT_EXECUTOR=slurm {command}")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return [
            "timeout",
            str(ANSWER),
            "env",
            *(word for name in of_another_job(os.environ) for word in ("-u", name)),
            "sbatch",
            str(submission_file_path),
        ]

    def _get_job_id_from_submission_command(self, string: bytes | str) -> str:
        self.sent = super()._get_job_id_from_submission_command(string)
        return self.sent

    def _num_tasks(self) -> int:
        return 1  # the batch process; it starts the others
