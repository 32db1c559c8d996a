"""A short job that a command submits and waits for: its result is a file, and Slurm is asked seldom.

Invariant: Slurm is asked at most once in ASK seconds: many users who wait for a quarter of an hour each are no
load to it.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpcrl.cli.find_run import ASK
from hpcrl.errors import HpcrlError
from hpcrl.launch.allocation_request import AllocationRequest
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.slurm.job_script import BatchScript, batch_python, task_python
from hpcrl.launch.slurm.jobs import cancel, query_jobs
from hpcrl.launch.slurm.submit import render, send_script
from hpcrl.report.file_tail import end_of_text
from hpcrl.run.queued_job import JobKey, QueuedJob
from hpcrl.run.rundir import write_atomic
from hpcrl.utils.check_results import last_line
from hpcrl.utils.shipped_files import shipped
from hpcrl.utils.waiting import Deadline, LastSign

T = TypeVar("T")
POLL = 1.0  #: seconds between two looks for the result


class AwaitedJob:
    """What is known of the job."""

    def __init__(self, job: JobKey) -> None:
        self._job = job
        self._asked = LastSign()
        self._ended = 0
        self.word: QueuedJob | None = None
        self.note = ""

    @property
    def over(self) -> bool:
        """Whether it has ended, as two answers one after the other have it: the first may be a mistake, and the files
        of a job that has ended have time to show."""
        if self._ended < 2 and self._asked.due(ASK):
            answer = query_jobs([self._job])
            word, self.note = answer.jobs.get(self._job), answer.note
            self.word = word or self.word
            self._ended = self._ended + 1 if word and word.phase in ("ended", "gone") else 0
        return self._ended > 1

    def state(self) -> str:
        """Slurm's last word, or why it gives none."""
        return " ".join(filter(None, (self.word.word, self.word.reason))) if self.word else self.note


def short_script(
    name: str, title: str, module: str, directory: Path, site: SiteProfile, request: AllocationRequest
) -> str:
    """The batch script of a short job, which runs `python -m MODULE DIRECTORY` and says in DIRECTORY/job.log how."""
    script = BatchScript(
        name=name,
        title=title,
        summary="hpcrl's checks",
        command=f"{shlex.quote(batch_python(site))} -m {module} {shlex.quote(str(directory))}",
        output=str(directory / "job.log"),
        # outside of the directory: a node that does not see it shall say so itself
        launch=str(shipped("launch") if site.container.kind == "none" else directory / "launch"),
        mounts=(str(directory),),
        python=task_python(site),
    )
    return render(script, request, site)


def run_job(script: str, directory: Path, result: Callable[[], T | None], deadline: Deadline, does: str) -> T:
    """Submit a script, and return what `result` says once that is not None; else the job is cancelled.

    DIRECTORY/launch is for a container, which sees this directory, but perhaps not where hpcrl is installed.

    Args:
        does: what the job does, for a line on stderr.

    Raises:
        HpcrlError: if the job ends without a result, or is too late.
    """
    shutil.copytree(shipped("launch"), directory / "launch", dirs_exist_ok=True)
    write_atomic(directory / "job.sh", script.encode())
    job = JobKey(send_script(directory / "job.sh"), "", time.time(), history=False)
    print(f"hpcrl: job {job.job_id} {does}", file=sys.stderr)
    awaited = AwaitedJob(job)
    try:
        while (found := result()) is None:
            if awaited.over:
                raise _lost(job, directory / "job.log")
            if deadline.over:
                hint = "give it longer with --wait, or fix what it waits for"
                raise HpcrlError(f"job {job.job_id} did not end in time: {awaited.state()}", hint)
            time.sleep(POLL)
        return found
    finally:
        if result() is None:
            with contextlib.suppress(HpcrlError):
                cancel(job.job_id)


def _lost(job: JobKey, log: Path) -> HpcrlError:
    if not log.exists():
        hint = "choose a directory on a file system that all nodes share"
        return HpcrlError(f"job {job.job_id} ended without writing into {log.parent}", hint)
    said = last_line(end_of_text(log))
    return HpcrlError(f"job {job.job_id} ended without a result: {said}", "see setup, modules and python of the site")
