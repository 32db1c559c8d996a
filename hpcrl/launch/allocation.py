"""The Slurm job around the batch process of a run, as this package sees it: hpcrl/launch/slurm/batch_process.py asks
Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hpcrl.errors import HpcrlError
from hpcrl.run.job_files import JobFile

if TYPE_CHECKING:
    from hpcrl.launch.attempts.attempt import BatchBackend
    from hpcrl.plan import Host


class AlreadyRequeued(HpcrlError):
    """Slurm is queueing the job again by itself."""


class SchedulerSilent(HpcrlError):
    """Slurm did not answer, or could not right now: it is worth asking again."""


class Allocation(Protocol):
    """The job that this process is the batch process of.

    Attributes:
        restarts: how often the job has been started before.
        cluster: its name, if Slurm has one.
    """

    job_id: str
    restarts: int
    cluster: str | None
    backend: BatchBackend

    def nodes(self) -> list[Host]:
        """The job's nodes in order with their slots, without addresses."""

    def ends(self) -> float | None:
        """When the job's time limit is, in Unix seconds; None without a limit, or where Slurm does not say."""

    def preempted(self) -> bool:
        """Whether Slurm wants the job's nodes for another one, and has given it some time to end; False if
        unknown."""

    def failed(self, hosts: Sequence[str], since: float, until: float) -> dict[str, str]:
        """Those of `hosts` that Slurm knows to have failed between these unix times, with its words; {} if it
        does not know."""

    def requeue(self) -> None:
        """Queue the job again; it is ended soon after.

        AlreadyRequeued; SchedulerSilent if there was no answer; another HpcrlError if that is refused.
        """

    def leave_out(self, job_id: str, hosts: Sequence[str]) -> None:
        """Keep a job that waits in the queue off these hosts.

        Raises:
            HpcrlError: if that is refused.
        """

    def mark(self, identity: str, said: str = "") -> None:
        """Have the job carry the run's identity, if it does not yet.

        Args:
            said: and why it ends, where no file can say so.
        """

    def continue_elsewhere(self, root: Path, record: JobFile) -> str:
        """Submit another job, which continues the run without the hosts that broke; its number.

        Raises:
            UsageError: if there is nothing here to submit with, HpcrlError if it is refused.
        """
