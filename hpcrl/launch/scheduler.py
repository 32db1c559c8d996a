"""What hpcrl asks of a scheduler: on a login node (`Scheduler`), and inside a job of its (`Allocation`).

A scheduler is one room of files that knows its words: it implements these two, and hpcrl/launch/schedulers.py, or an
entry point of the package that brings it, gives it the name that a site's profile has under `scheduler`.  All else,
from `hpcrl submit` to the queueing again before a time limit, speaks to it through this file.

Invariant: nothing heavy is imported here or to make a Scheduler: `hpcrl status` makes one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hpcrl.errors import HpcrlError
from hpcrl.findings import Finding
from hpcrl.run.queued_job import JobKey, QueueAnswer

if TYPE_CHECKING:
    from hpcrl.launch.attempt import BatchBackend
    from hpcrl.launch.job_request import Request
    from hpcrl.launch.site import Site
    from hpcrl.launch.submission import Script, Submission
    from hpcrl.plan import Host


class Verdict(NamedTuple):
    """What a scheduler would do with a script now: its words, and where it would not take it what to do about that.

    never: whether it would refuse it at any other time too, and not only as long as nodes are down or drained.
    """

    accepted: bool
    said: str
    hint: str = ""
    never: bool = False


class SubmittedJob(Protocol):
    """A job that the scheduler has taken."""

    @property
    def job_id(self) -> str: ...


class Scheduler(Protocol):
    """A scheduler, from a machine that may submit jobs.

    title: its name in messages, such as "Slurm".  submit_command: what takes a script, such as "sbatch"; test_command:
    what tries one without taking it, "" if nothing does.  script_file: the script's name in a run directory.  echoes:
    how lines begin in which its own programs only repeat that a task of theirs has failed.
    """

    title: str
    submit_command: str
    test_command: str
    script_file: str
    echoes: tuple[str, ...]

    def profile(self) -> type[Site]:
        """The keys of a site's profile: those of every site, and its own."""

    # ---- the queue

    def here(self) -> bool:
        """Whether the queue can be asked from this machine."""

    def look(self, jobs: Sequence[JobKey]) -> QueueAnswer:
        """Its word on all these jobs, in one question.  Never an error: where it is missing, slow or fails, a note says
        so."""

    def cancel(self, job_id: str) -> None:
        """End the job, or take it out of the queue.  HpcrlError with its words if it does not."""

    # ---- before a job

    def responds(self) -> Iterator[Finding]:
        """Whether its programs are here and answer."""

    def fits(self, request: Request, site: Site) -> Iterator[Finding]:
        """Whether the site can hold the request: what it cannot would be refused, or wait for ever."""

    def test(self, script: str) -> Verdict:
        """Whether it would take the script now; asked only if there is a test_command, and of no weight in a
        submission."""

    # ---- scripts and submission

    def render(self, script: Script, request: Request, site: Site) -> str:
        """The text of a batch script."""

    def script(self, submission: Submission) -> str:
        """The text of the script that `submit` would send."""

    def script_by_hand(self, submission: Submission, words: Sequence[str]) -> str:
        """The text for a person to edit and submit, which starts a run anew.  words: the recipe and its options."""

    def submit(self, submission: Submission) -> SubmittedJob:
        """Write the run's script into its directory and submit it.  UsageError with a hint if it is refused."""

    def submit_script(self, file: Path) -> str:
        """Submit a script as it is; the job's number.  HpcrlError if it is refused."""


# ---- inside a job


class AlreadyRequeued(HpcrlError):
    """The scheduler is queueing the job again by itself."""


class SchedulerSilent(HpcrlError):
    """The scheduler did not answer, or could not right now: it is worth asking again."""


class Allocation(Protocol):
    """The job that this process is the batch process of.

    scheduler: its name, as job.json has it; restarts: how often the job has been started before; cluster: its name, if
    the scheduler has one.
    """

    scheduler: str
    title: str
    job_id: str
    restarts: int
    cluster: str | None
    backend: BatchBackend

    def nodes(self) -> list[Host]:
        """The job's nodes in order with their slots, without addresses."""

    def ends(self) -> float | None:
        """When the job's time limit is, in Unix seconds; None without a limit, or where the scheduler does not say."""

    def preempted(self) -> bool:
        """Whether the scheduler wants the job's nodes for another one, and has given it some time to end; False if
        unknown."""

    def failed(self, hosts: Sequence[str], since: float, until: float) -> dict[str, str]:
        """Those of `hosts` that the scheduler knows to have failed between these unix times, with its words; {} if it
        does not know."""

    def requeue(self) -> None:
        """Queue the job again; it is ended soon after.

        AlreadyRequeued; SchedulerSilent if there was no answer; another HpcrlError if that is refused.
        """

    def leave_out(self, job_id: str, hosts: Sequence[str]) -> None:
        """Keep a job that waits in the queue off these hosts.  HpcrlError if that is refused."""

    def mark(self, identity: str, said: str = "") -> None:
        """Have the job carry the run's identity, if it does not yet.  said: and why it ends, where no file can say
        so."""
