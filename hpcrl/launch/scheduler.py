"""What hpcrl asks of a scheduler, on a login node (`Scheduler`) and inside one of its jobs (`Allocation`), and the data
that it asks with: the `AllocationRequest` for an allocation, the `BatchScript` of a job, the `Submission` of a run.

A scheduler is one room of files that knows its words: it implements these two protocols, and scheduler_names.py, or an
entry point of the package that brings it, gives it the name that a site's profile has under `scheduler`.  All else,
from `hpcrl submit` to the requeue before a time limit, speaks to it through this file.

Invariant: nothing heavy is imported here or to make a Scheduler: `hpcrl status` makes one.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.findings import Finding
from hpcrl.launch.scheduler_names import find_scheduler
from hpcrl.run.queued_job import JobKey, QueueAnswer
from hpcrl.shipped_files import shipped

if TYPE_CHECKING:
    from hpcrl.config.options import Options
    from hpcrl.launch.attempts.attempt import BatchBackend
    from hpcrl.launch.job import RunJob
    from hpcrl.launch.site import SiteProfile
    from hpcrl.plan import Host

# ---- what it is asked for


class Component(msgspec.Struct, frozen=True):
    """One component of a heterogeneous job, or the whole of a homogeneous one.

    Attributes:
        slots: GPUs (or process slots) a node; 0 for the rollout process alone.
        name: key of the site's table for it.
    """

    name: str
    nodes: int
    slots: int
    cpus: int | None


class AllocationRequest(msgspec.Struct, frozen=True):
    """The allocation.

    Attributes:
        margin: seconds before the time limit at which the batch process is to be signalled.
        spares: how many of the first component's nodes, the last of them, only wait until another is lost.
        outlives_nodes: whether the job is to continue without a node that is lost.
    """

    layout: str
    components: tuple[Component, ...]
    margin: int
    spares: int = 0
    outlives_nodes: bool = False

    def hosts(self) -> list[Host]:
        """Stand-ins for the nodes that the job will get, in order."""
        from hpcrl.plan import Host

        hosts = [Host(f"{c.name}-{i}", c.slots) for c in self.components for i in range(c.nodes)]
        spare = range(self.components[0].nodes - self.spares, self.components[0].nodes)
        return [msgspec.structs.replace(host, spare=number in spare) for number, host in enumerate(hosts)]


@dataclass(frozen=True)
class BatchScript:
    """What differs from one batch script to the next.

    Attributes:
        command: the shell text that becomes the batch process.
        output: the scheduler's file for what it says.
        launch: directory of task.sh.
        identity: of the run, for the job to carry.
        follows: the number of a job that must have ended, however.
        mounts: directories that a container must see.
        tasks: "hosts" or "slots".
        python: the interpreter on the nodes where the site names none.
    """

    name: str
    title: str
    summary: str
    command: str
    output: str
    launch: str
    identity: str = ""
    mounts: tuple[str, ...] = ()
    tasks: str = "hosts"
    python: str = "python3"
    follows: str = ""


@dataclass(frozen=True)
class Submission:
    """A run that is to become a job.

    Attributes:
        job: not yet on disk, for one that is only shown.
        follows: the job of its chain before it.
    """

    job: RunJob
    stages: list[Options]
    request: AllocationRequest
    site: SiteProfile
    follows: str = ""

    def table(self) -> str:
        """The plan of the stage that needs most, with stand-ins for the nodes that the scheduler will give."""
        from hpcrl.plan import hosts_kept, make_plan

        largest = max(self.stages, key=lambda o: o.world_size + o.engine_gpus)
        hosts = self.request.hosts()
        spare = "".join(f"\nspare    {host.name}" for host in hosts if host.spare)
        return make_plan(largest, hosts, "plan", kept=hosts_kept(self.stages)).table() + spare

    def tasks(self) -> str:
        """What a job step starts on each node: one task for each of its "slots", or one for "hosts"."""
        return "slots" if self.stages[0].rank_launcher == "ranks" else "hosts"

    def script(self, command: str, output: str) -> BatchScript:
        """The script of this run."""
        from hpcrl.launch.container import mountable

        root = self.job.root
        return BatchScript(
            name=self.job.recipe.name,
            title=f"{self.job.recipe.name}: one run of hpcrl as one {self.request.layout} job",
            summary=self.table(),
            command=command,
            output=output,
            launch=str(root / "launch"),
            identity=self.job.identity,
            mounts=(mountable(root),),
            tasks=self.tasks(),
            python=task_python(self.site),
            follows=self.follows,
        )

    def script_by_hand(self, command: str, output: str) -> BatchScript:
        """A script for a person, which may be submitted from any directory; the run's directory is made there.

        A container sees neither that directory nor launch/: both are mounted.
        """
        launch = str(shipped("launch"))
        inside = self.site.container.kind != "none"
        return BatchScript(
            name=self.job.recipe.name,
            title=f"{self.job.recipe.name}: one run of hpcrl as one {self.request.layout} job; edit it, then: "
            f"{load_scheduler(self.site.scheduler).submit_command} THIS_FILE",
            summary=self.table(),
            command=command,
            output=output,
            launch=launch,
            mounts=(str(Path.cwd()), launch) if inside else (),
            tasks=self.tasks(),
            python=task_python(self.site),
        )


def batch_python(site: SiteProfile) -> str:
    """The interpreter of the batch process, which starts the steps and so runs outside of any container."""
    return site.python if site.python and site.container.kind == "none" else sys.executable


def task_python(site: SiteProfile) -> str:
    """The interpreter of the processes on the nodes, where the site names none."""
    return sys.executable if site.container.kind == "none" else "python3"


# ---- from a login node


class ScriptVerdict(NamedTuple):
    """What a scheduler would do with a script now: its words, and where it would not take it what to do about that.

    Attributes:
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

    Attributes:
        title: its name in messages, such as "Slurm".
        submit_command: what takes a script, such as "sbatch".
        test_command: what tries one without taking it, "" if nothing does.
        script_file: the script's name in a run directory.
        echoes: how lines begin in which its own programs only repeat that a task of theirs has failed.
    """

    title: str
    submit_command: str
    test_command: str
    script_file: str
    echoes: tuple[str, ...]

    def profile(self) -> type[SiteProfile]:
        """The keys of a site's profile: those of every site, and its own."""

    # ---- the queue

    def here(self) -> bool:
        """Whether the queue can be asked from this machine."""

    def look(self, jobs: Sequence[JobKey]) -> QueueAnswer:
        """Its word on all these jobs, in one question.  Never an error: where it is missing, slow or fails, a note says
        so."""

    def cancel(self, job_id: str) -> None:
        """End the job, or take it out of the queue.

        Raises:
            HpcrlError: with its words if it does not.
        """

    # ---- before a job

    def responds(self) -> Iterator[Finding]:
        """Whether its programs are here and answer."""

    def fits(self, request: AllocationRequest, site: SiteProfile) -> Iterator[Finding]:
        """Whether the site can hold the request: what it cannot would be refused, or wait for ever."""

    def test(self, script: str) -> ScriptVerdict:
        """Whether it would take the script now; asked if there is a test_command, of no weight in a submission."""

    # ---- scripts and submission

    def render(self, script: BatchScript, request: AllocationRequest, site: SiteProfile) -> str:
        """The text of a batch script."""

    def script(self, submission: Submission) -> str:
        """The text of the script that `submit` would send."""

    def script_by_hand(self, submission: Submission, words: Sequence[str]) -> str:
        """The text for a person to edit and submit, which starts a new run.

        Args:
            words: the recipe and its options.
        """

    def submit(self, submission: Submission) -> SubmittedJob:
        """Write the run's script into its directory and submit it.

        Raises:
            UsageError: with a hint if it is refused.
        """

    def submit_script(self, file: Path) -> str:
        """Submit a script as it is; the job's number.

        Raises:
            HpcrlError: if it is refused.
        """


@cache
def load_scheduler(name: str) -> Scheduler:
    """The scheduler of that name.

    Raises:
        UsageError: lists those that there are if it is none of them, or cannot be loaded.
    """
    return find_scheduler(name)()


def can_submit(scheduler: Scheduler) -> bool:
    """Whether this machine has the command that submits."""
    return shutil.which(shlex.split(scheduler.submit_command)[0]) is not None


# ---- inside a job


class AlreadyRequeued(HpcrlError):
    """The scheduler is queueing the job again by itself."""


class SchedulerSilent(HpcrlError):
    """The scheduler did not answer, or could not right now: it is worth asking again."""


class Allocation(Protocol):
    """The job that this process is the batch process of.

    Attributes:
        scheduler: its name, as job.json has it.
        restarts: how often the job has been started before.
        cluster: its name, if the scheduler has one.
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

    def cancelled(self) -> bool:
        """Whether the scheduler is ending the job, which a user has cancelled; False if unknown."""

    def failed(self, hosts: Sequence[str], since: float, until: float) -> dict[str, str]:
        """Those of `hosts` that the scheduler knows to have failed between these unix times, with its words; {} if it
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
