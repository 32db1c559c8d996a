"""A recipe as one Slurm job: its submission, and its submission again.

Invariants: what can be known to fail is refused before anything is submitted; what is submitted is, as text, in the
run directory.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, resolve_stages
from hpcrl.errors import HpcrlError, UsageError, raise_together
from hpcrl.launch.allocation_request import FLOOR, AllocationRequest, make_request
from hpcrl.launch.broken_hosts import broken_hosts
from hpcrl.launch.job import RunJob, begin_job, directory_of, hold_run, reopen_job
from hpcrl.launch.preflight import NOTHING, HostView, absent, made_by_run, refuse_settings, same_packages
from hpcrl.launch.requeue import later_jobs, margin
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.site_file import from_flags, saved_site
from hpcrl.launch.slurm.job_script import Submission
from hpcrl.launch.slurm.jobs import can_submit, cancel, query_jobs
from hpcrl.launch.slurm.partitions import judge_request
from hpcrl.launch.slurm.submit import SCRIPT, send
from hpcrl.launch.stop_signals import HeldSignals
from hpcrl.launch.user_code.snapshot import switched_code
from hpcrl.report.progress import say
from hpcrl.rollout.prompts.first_rows import look_at
from hpcrl.run.job_files import SUBMITTING, JobFile, write_job
from hpcrl.run.queued_job import JobKey
from hpcrl.run.rundir import RunDir
from hpcrl.utils.shipped_files import shipped


def preview(recipe: Recipe, overrides: dict[str, Any], site: SiteProfile, packages: bool = False) -> Submission:
    """What `submit_new` would submit, without a run directory.

    Args:
        packages: whether those of this interpreter count where the site runs it.

    Raises:
        UsageError, DataError: for what cannot run.
    """
    places = {"run": "{run}", "prepared": "{run}/prepared"}
    stages = list(resolve_stages(recipe, overrides, places))
    request = make_request(stages, site)
    refuse_settings(stages, lambda _: request.hosts(), packages=False)
    if packages and same_packages(site):
        _refuse_for_packages(stages, request)
    look_at(stages)
    return Submission(RunJob(recipe, overrides, directory_of(recipe, overrides), "IDENTITY"), stages, request, site)


def _refuse_for_packages(stages: list[Options], request: AllocationRequest) -> None:
    """Raise UsageError for what this interpreter lacks, which the nodes run unless the site names theirs."""
    try:
        refuse_settings(stages, lambda _: request.hosts(), packages=True)
    except UsageError as error:
        nodes = "if the nodes have it, name their interpreter, which is asked there: --set python=PATH"
        raise UsageError(error.what, f"{error.hint}; {nodes}" if error.hint else nodes) from error


def submit_new(
    recipe: Recipe, overrides: dict[str, Any], site: SiteProfile, chain: int = 1
) -> tuple[Submission, list[Any]]:
    """Make a run directory and submit its job, or a chain of them.

    Raises:
        UsageError: for what cannot run, and then nothing is left behind.
    """
    site = chained(site, chain)
    if not can_submit():
        raise UsageError(
            "no sbatch on this machine", "submit from a login node of the cluster; hpcrl run needs no Slurm"
        )
    shown = preview(recipe, overrides, site)
    refuse_unfit(shown.request, shown.site)
    refuse_absent_files(shown)
    job = begin_job(  # which may take a while: Ctrl-C ends it
        recipe,
        overrides,
        lambda _: shown.request.hosts(),
        here=False,
        pythonpath=site.env.get("PYTHONPATH"),
    )
    submission = replace(shown, job=job)
    with _removed_on_error(job.root):
        _note_job(submission, None, None)  # else it would count as a run of this machine until it has a job
    with HeldSignals(), _removed_on_error(job.root):
        return submission, _send(submission, chain)


@contextlib.contextmanager
def _removed_on_error(root: Path) -> Iterator[None]:
    """Remove the directory if what is done in this context fails: nothing runs, so nothing is to be found later."""
    try:
        yield
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise


def refuse_unfit(request: AllocationRequest, site: SiteProfile) -> None:
    """Raise UsageError if the site cannot hold the job, which Slurm might else accept and let wait for ever.

    What is only worth knowing is said.
    """
    findings = list(judge_request(site, request))
    if bad := [finding for finding in findings if finding.level == "fail"]:
        raise UsageError(bad[0].what, bad[0].hint)
    for finding in findings:
        if finding.level == "warn":
            say(f"note: {finding.what}; {finding.hint}")


def refuse_absent_files(shown: Submission) -> None:
    """Raise UsageError for what the run of a `preview` begins with and the login node does not see."""
    raise_together(absent(shown.stages, sight_of(shown.site, shown.job.recipe)))


def sight_of(site: SiteProfile, recipe: Recipe, run: str = "{run}") -> HostView:
    """What the login node can see of the nodes.

    Not what the run makes, or a job that it waits for; nothing where an image has its own paths, or on disks of the
    nodes.

    Args:
        run: the run directory, as paths of the options have it.
    """
    if site.container.kind != "none" or site.after:
        return NOTHING
    local = site.scratch if site.scratch and site.scratch.startswith("/") else run
    same_code = not site.setup and site.python in (None, sys.executable) and "PYTHONPATH" not in site.env
    return HostView(lambda path: path.startswith(local) or made_by_run(recipe, run, path), same_code)


def chained(site: SiteProfile, chain: int) -> SiteProfile:
    """The site for a chain of so many jobs: none of them is requeued, since the next one continues."""
    return site.model_copy(update={"requeue": False}) if chain > 1 else site


def submit_again(
    job: RunJob,
    record: JobFile,
    own: Mapping[str, Any],
    live: bool | None = None,
    change: contextlib.AbstractContextManager[None] | None = None,
) -> tuple[Submission, list[Any]]:
    """Submit a run once more, with the site of its job.json (`record`) and what the flags `own` change of it.

    Nodes that the run has found broken are left out.

    Args:
        live: see `resume_code`; nothing changes if the run cannot be submitted.
        change: writes the options in which `job` differs from its directory, and takes them back after an error.
    """
    root, chain = job.root, own.get("chain", 1)
    _check_gone(root, record)
    site = chained(from_flags(own, None if "site" in own else saved_site(record.site).again()), chain)
    site = site.model_copy(update={"exclude": [*dict.fromkeys((*site.exclude, *broken_hosts(root)))]})
    stages = list(job.stages)
    measured = max(margin(RunDir(job.directory(stage)), FLOOR) for stage in job.recipe.stages)
    submission = Submission(job, stages, make_request(stages, site, int(measured)), site)
    if change or "site" in own:
        refuse_settings(stages, lambda _: submission.request.hosts(), packages=False)
        refuse_unfit(submission.request, site)
    with contextlib.ExitStack() as until_submitted:
        with hold_run(job.root):
            until_submitted.enter_context(switched_code(root, live))
            until_submitted.enter_context(change or contextlib.nullcontext())
        return submission, _send(submission, chain)


def submit_elsewhere(root: Path, record: JobFile) -> str:
    """From the end of the run's own job: another that continues without the hosts that broke; its number.

    Raises:
        UsageError: if there is nothing here to submit with, HpcrlError if it is refused.
    """
    site = saved_site(record.site or {}).again()
    if not can_submit():
        raise UsageError("no sbatch on this machine", "submit from a login node")
    site = site.model_copy(update={"exclude": [*dict.fromkeys((*site.exclude, *broken_hosts(root)))]})
    job = reopen_job(root)
    submission = Submission(job, list(job.stages), make_request(job.stages, site), site)
    return _send(submission)[0].job_id


def _check_gone(root: Path, record: JobFile) -> None:
    """Raise UsageError if the run's job, or a later one of its chain, is still queued or running."""
    if not record.job_id and time.time() - record.submitted < SUBMITTING:
        raise UsageError(f"another process is submitting {root}", f"if it was interrupted, wait {SUBMITTING:.0f} s")
    keys = [
        JobKey(name, record.identity, record.submitted, history=False)
        for name in (record.job_id, *later_jobs(record))
        if name  # it has none if it was never submitted
    ]
    words = query_jobs(keys).jobs
    for key in keys:
        word = words.get(key)
        if word and word.phase in ("pending", "running"):
            raise UsageError(f"{root}: its job {key.job_id} is {word.word.lower()}", "hpcrl cancel it first, or wait")


def _send(submission: Submission, chain: int = 1) -> list[Any]:
    """Submit it, `chain` times, each job after the one before; all or none of them stay in the queue.

    SIGTERM, SIGHUP (a connection that is lost) and SIGINT wait for Slurm's answer.
    """
    root, jobs = submission.job.root, list[Any]()
    shutil.copytree(shipped("launch"), root / "launch", dirs_exist_ok=True)
    with HeldSignals() as signals:
        try:
            while len(jobs) < chain:
                jobs.append(send(replace(submission, follows=jobs[-1].job_id if jobs else "")))
                chained_jobs = [job.job_id for job in jobs] if chain > 1 else []
                _note_job(submission, jobs[0], root / SCRIPT, chained_jobs)
                signals.check()
        except BaseException:
            for job in reversed(jobs):
                try:
                    cancel(job.job_id)
                except HpcrlError as error:
                    say(f"note: job {job.job_id} may still be in the queue: {error}")
            raise
    return jobs


def _note_job(submission: Submission, job: Any, script: Path | None, chain: Sequence[str] = ()) -> None:
    """Write a run's job.json.

    Args:
        job: submitit's; None before it is submitted.
        script: its batch script, None before there is one.
        chain: the numbers of all jobs of a chain.
    """
    write_job(
        submission.job.root,
        submission.job.identity,
        "slurm",
        job.job_id if job else None,
        script=str(script) if script else None,
        components=[msgspec.to_builtins(component) for component in submission.request.components],
        site=submission.site.model_dump(),
        chain=[*chain],
    )
