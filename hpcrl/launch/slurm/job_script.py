"""What a batch script is made of: the `Submission` of a run, the `BatchScript` of a job; and what sbatch says of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpcrl.config.options import Options
from hpcrl.launch.allocation_request import AllocationRequest
from hpcrl.launch.container import mountable
from hpcrl.launch.job import RunJob
from hpcrl.launch.site import SiteProfile
from hpcrl.plan import hosts_kept, make_plan
from hpcrl.utils.shipped_files import shipped


@dataclass(frozen=True)
class BatchScript:
    """What differs from one batch script to the next.

    Attributes:
        command: the shell text that becomes the batch process.
        output: Slurm's file for what it says.
        launch: directory of task.sh.
        identity: of the run, for the job to carry.
        follows: the number of a job that must have ended, however.
        mounts: directories that a container must see.
        tasks: "hosts" or "slots".
        python: the interpreter on the nodes where the site names none.
        requeue: sbatch's option for a job that may be queued again.
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
    requeue: str = "requeue"


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
        """The plan of the stage that needs most, with stand-ins for the nodes that Slurm will give."""
        largest = max(self.stages, key=lambda o: o.world_size + o.engine_gpus)
        hosts = self.request.hosts()
        spare = "".join(f"\nspare    {host.name}" for host in hosts if host.spare)
        return make_plan(largest, hosts, "plan", kept=hosts_kept(self.stages)).table() + spare

    def tasks(self) -> str:
        """What a job step starts on each node: one task for each of its "slots", or one for "hosts"."""
        return "slots" if self.site.rank_launcher == "ranks" else "hosts"

    def script(self, command: str, output: str) -> BatchScript:
        """The script of this run."""
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
            "sbatch THIS_FILE",
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


class ScriptVerdict(NamedTuple):
    """What sbatch would do with a script now: its words, and where it would not take it what to do about that.

    Attributes:
        never: whether it would refuse it at any other time too, and not only as long as nodes are down or drained.
    """

    accepted: bool
    text: str
    hint: str = ""
    never: bool = False
