"""A recipe as one job of a scheduler's: what is submitted, and again where it stopped.

Invariant: what can be known to fail is refused before anything is submitted; what is submitted lies, as text, in the
run directory.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, resolve_stages
from hpcrl.errors import HpcrlError, UsageError, raise_together
from hpcrl.launch.before_start import NOTHING, Sight, absent, made_by_run, refuse_settings
from hpcrl.launch.job import Job, begin_job, directory_of, held, reopen_job
from hpcrl.launch.job_request import FLOOR, Request, make_request
from hpcrl.launch.model_settings import same_packages
from hpcrl.launch.restarts.chain import later
from hpcrl.launch.restarts.restart_policy import broken_hosts, margin
from hpcrl.launch.scheduler import Scheduler, SubmittedJob
from hpcrl.launch.schedulers import load_scheduler
from hpcrl.launch.site import Site, from_flags, saved_site
from hpcrl.plan import make_plan
from hpcrl.prompt_files.early_look import look_at
from hpcrl.run.job_files import JobFile, write_job
from hpcrl.run.queued_job import JobKey
from hpcrl.run.rundir import RunDir
from hpcrl.shipped_files import shipped


@dataclass(frozen=True)
class Script:
    """What differs from one batch script to the next.

    command: the shell text that becomes the batch process; output: the scheduler's file for what it says; launch:
    directory of task.sh; identity: of the run, for the job to carry; follows: the number of a job that must have ended,
    however; mounts: directories that a container must see; tasks: "hosts" or "slots"; python: the interpreter on the
    nodes where the site names none.
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
    """A run that is to become a job.  job: not yet on disk, for one that is only shown; follows: the job of its chain
    before it."""

    job: Job
    stages: list[Options]
    request: Request
    site: Site
    follows: str = ""

    def table(self) -> str:
        """The plan of the stage that needs most, with stand-ins for the nodes that the scheduler will give."""
        largest = max(self.stages, key=lambda o: o.world_size + o.engine_gpus)
        return make_plan(largest, self.request.hosts(), "plan").table()

    def tasks(self) -> str:
        """What a job step starts on each node: one task for each of its "slots", or one for "hosts"."""
        return "slots" if self.stages[0].rank_launcher == "ranks" else "hosts"

    def script(self, command: str, output: str) -> Script:
        """The script of this run."""
        root = self.job.root
        return Script(
            name=self.job.recipe.name,
            title=f"{self.job.recipe.name}: one run of hpcrl as one {self.request.layout} job",
            summary=self.table(),
            command=command,
            output=output,
            launch=str(root / "launch"),
            identity=self.job.identity,
            mounts=(str(root),),
            tasks=self.tasks(),
            python=task_python(self.site),
            follows=self.follows,
        )

    def script_by_hand(self, command: str, output: str) -> Script:
        """A script for a person: paths as they were given, relative to where it is submitted.

        A container sees neither that directory, in which the run's will lie, nor launch/: there both are mounted, by
        whole paths.
        """
        launch, mounts = "launch", tuple[str, ...]()
        if self.site.container.kind != "none":
            here = Path.cwd()
            launch = str(here / launch if (here / launch / "task.sh").is_file() else shipped(launch))
            mounts = tuple(dict.fromkeys((str(here), launch)))
        return Script(
            name=self.job.recipe.name,
            title=f"{self.job.recipe.name}: one run of hpcrl as one {self.request.layout} job; edit it, then: "
            f"{load_scheduler(self.site.scheduler).submit_command} THIS_FILE",
            summary=self.table(),
            command=command,
            output=output,
            launch=launch,
            mounts=mounts,
            tasks=self.tasks(),
        )


def batch_python(site: Site) -> str:
    """The interpreter of the batch process, which starts the steps and so runs outside of any container."""
    return site.python if site.python and site.container.kind == "none" else sys.executable


def task_python(site: Site) -> str:
    """The interpreter of the processes on the nodes, where the site names none."""
    return sys.executable if site.container.kind == "none" else "python3"


def preview(recipe: Recipe, overrides: dict[str, Any], site: Site, packages: bool = False) -> Submission:
    """What `submit_new` would submit, without a run directory.

    packages: whether those of this interpreter count where the site runs it.  UsageError or DataError for what cannot
    run.
    """
    places = {"run": "{run}", "prepared": "{run}/prepared"}
    stages = list(resolve_stages(recipe, overrides, places))
    request = make_request(stages, site)
    refuse_settings(stages, lambda _: request.hosts(), packages and same_packages(site))
    look_at(stages)
    return Submission(Job(recipe, overrides, directory_of(recipe, overrides), "IDENTITY"), stages, request, site)


def can_submit(scheduler: Scheduler) -> bool:
    """Whether this machine has the command that submits."""
    return shutil.which(shlex.split(scheduler.submit_command)[0]) is not None


def submit_new(
    recipe: Recipe, overrides: dict[str, Any], site: Site, chain: int = 1
) -> tuple[Submission, list[SubmittedJob]]:
    """Make a run directory and submit its job, or a chain of them.  UsageError for what cannot run, and then nothing is
    left behind."""
    site = chained(site, chain)
    scheduler = load_scheduler(site.scheduler)
    if not can_submit(scheduler):
        program = shlex.split(scheduler.submit_command)[0]
        raise UsageError(
            f"{program} is not here", f"submit from a login node of the cluster; hpcrl run needs no {scheduler.title}"
        )
    shown = preview(recipe, overrides, site)
    refuse_what_does_not_fit(scheduler, shown)
    refuse_absent_files(shown)
    job = begin_job(recipe, overrides, lambda _: shown.request.hosts(), here=False)
    submission = Submission(job, shown.stages, shown.request, site)
    try:
        return submission, _send(scheduler, submission, chain)
    except BaseException:
        shutil.rmtree(job.root, ignore_errors=True)  # nothing runs, so nothing is to be found later
        raise


def refuse_what_does_not_fit(scheduler: Scheduler, submission: Submission) -> None:
    """UsageError if the site cannot hold the job, which the scheduler might else accept and let wait for ever."""
    if bad := [finding for finding in scheduler.fits(submission.request, submission.site) if finding.level == "fail"]:
        raise UsageError(bad[0].what, bad[0].hint)


def refuse_absent_files(shown: Submission) -> None:
    """UsageError for what the run of a `preview` begins with and the login node does not see."""
    raise_together(absent(shown.stages, sight_of(shown.site, shown.job.recipe)))


def sight_of(site: Site, recipe: Recipe, run: str = "{run}") -> Sight:
    """What the login node can see of the nodes.  run: the run directory, as paths of the options have it.

    Not what the run makes, or a job that it waits for; nothing where an image has paths of its own, or on disks of the
    nodes.
    """
    if site.container.kind != "none" or getattr(site, "after", None):
        return NOTHING
    local = site.scratch if site.scratch and site.scratch.startswith("/") else run
    same_code = not site.setup and site.python in (None, sys.executable) and "PYTHONPATH" not in site.env
    return Sight(lambda path: path.startswith(local) or made_by_run(recipe, run, path), same_code)


def chained(site: Site, chain: int) -> Site:
    """The site for a chain of so many jobs: none of them is queued again, since the next one goes on."""
    return site.model_copy(update={"requeue": False}) if chain > 1 else site


def submit_again(
    root: Path, record: JobFile, own: Mapping[str, Any], chain: int = 1
) -> tuple[Submission, list[SubmittedJob]]:
    """Submit a run once more, with the site of its job.json (`record`) and what the flags `own` change of it.

    Nodes that the run has found broken are left out.
    """
    job = reopen_job(root)
    _check_gone(root, record)
    with held(job.root):
        pass
    site = chained(from_flags(own, saved_site(record.site).again()), chain)
    site = site.model_copy(update={"exclude": [*dict.fromkeys((*site.exclude, *broken_hosts(root)))]})
    stages = list(job.stages)
    measured = max(margin(RunDir(job.directory(stage)), FLOOR) for stage in job.recipe.stages)
    submission = Submission(job, stages, make_request(stages, site, int(measured)), site)
    return submission, _send(load_scheduler(site.scheduler), submission, chain)


def submit_elsewhere(root: Path, record: JobFile) -> str:
    """From the end of the run's own job: another that goes on without the hosts that broke; its number.

    UsageError if there is nothing here to submit with, HpcrlError if it is refused.
    """
    site = saved_site(record.site or {}).again()
    scheduler = load_scheduler(site.scheduler)
    if not can_submit(scheduler):
        raise UsageError(f"{scheduler.submit_command} is not on this node", "submit from a login node")
    site = site.model_copy(update={"exclude": [*dict.fromkeys((*site.exclude, *broken_hosts(root)))]})
    job = reopen_job(root)
    submission = Submission(job, list(job.stages), make_request(job.stages, site), site)
    return _send(scheduler, submission, 1)[0].job_id


def _check_gone(root: Path, record: JobFile) -> None:
    """UsageError if the run's job, or a later one of its chain, is still queued or running."""
    keys = [
        JobKey(name, record.identity, record.submitted, history=False) for name in (str(record.job_id), *later(record))
    ]
    words = load_scheduler(record.scheduler).look(keys).jobs
    for key in keys:
        word = words.get(key)
        if word and word.phase in ("pending", "running"):
            raise UsageError(f"{root}: its job {key.job_id} is {word.word.lower()}", "hpcrl cancel it first, or wait")


def _send(scheduler: Scheduler, submission: Submission, chain: int) -> list[SubmittedJob]:
    """Submit it, `chain` times, each job after the one before; all or none of them stay in the queue."""
    root, jobs = submission.job.root, list[SubmittedJob]()
    shutil.copytree(shipped("launch"), root / "launch", dirs_exist_ok=True)
    try:
        while len(jobs) < chain:
            jobs.append(scheduler.submit(replace(submission, follows=jobs[-1].job_id if jobs else "")))
            write_job(
                root,
                submission.job.identity,
                submission.site.scheduler,
                jobs[0].job_id,
                script=str(root / scheduler.script_file),
                components=[msgspec.to_builtins(component) for component in submission.request.components],
                site=submission.site.model_dump(),
                chain=[job.job_id for job in jobs] if chain > 1 else [],
            )
    except BaseException:
        for job in reversed(jobs):
            with contextlib.suppress(HpcrlError):
                scheduler.cancel(job.job_id)
        raise
    return jobs
