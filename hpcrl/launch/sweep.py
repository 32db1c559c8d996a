"""The runs of a sweep as one job array of a scheduler, or one job each where there can be no array.

Invariants: all runs are checked as if each were submitted alone before anything is made; either all of them are
submitted, or none, and then nothing is left behind.  Each run is a run like any other, in its own directory.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.recipe import Recipe
from hpcrl.config.sweep import GridRun
from hpcrl.errors import UsageError, parts_of, raise_together
from hpcrl.launch.job import begin_job, directory_of, run_dir_of
from hpcrl.launch.scheduler import (
    BatchScript,
    JobArray,
    Scheduler,
    Submission,
    SubmittedJob,
    can_submit,
    load_scheduler,
)
from hpcrl.launch.site import SiteProfile
from hpcrl.launch.submission import (
    all_or_none,
    note_job,
    preview,
    refuse_absent_files,
    refuse_unfit,
    send,
    submitter,
)
from hpcrl.run.rundir import RunDir
from hpcrl.run.sweep_file import SweepFile, SweepRun, write_sweep
from hpcrl.shipped_files import shipped


def array_script(array: JobArray, command: str, output: str) -> BatchScript:
    """The one script of all tasks of an array; arguments as for `Submission.script`."""
    first = array.runs[0]
    tasks = [f"task {number}: {run.job.root.name}" for number, run in enumerate(array.runs)]
    return dataclasses.replace(
        first.script(command, output),
        title=f"{first.job.recipe.name}: {len(array.runs)} runs of hpcrl as one job array",
        summary="\n".join([first.table(), *tasks]),
        launch=str(array.root / "launch"),
        identity=array.identity,
        mounts=(str(array.root),),
        array=len(array.runs),
        at_once=array.at_once,
    )


@dataclass(frozen=True)
class Sweep:
    """A sweep as it would be submitted, or was.

    Attributes:
        root: its directory.
        runs: as `preview` or `begin_job` has made them.
        separate: why each run is a job of its own; "" where they are an array.
    """

    root: Path
    runs: tuple[Submission, ...]
    separate: str
    at_once: int = 0
    identity: str = "IDENTITY"

    def array(self) -> JobArray:
        """The array of all runs."""
        return JobArray(self.root, self.identity, self.runs, self.at_once)


def preview_sweep(
    recipe: Recipe, flags: Mapping[str, Any], site: SiteProfile, runs: Sequence[GridRun], at_once: int = 0
) -> Sweep:
    """What `submit_sweep` would submit, without any directory.

    Args:
        flags: those of all runs.
        at_once: how many may run at once, 0 for any number.

    Raises:
        UsageError: what any run would be refused for; names the run.
    """
    scheduler = load_scheduler(site.scheduler)
    root, packages = directory_of(recipe, dict(flags)), can_submit(scheduler)
    shown, wrong = list[Submission](), list[UsageError]()
    for run in runs:
        try:
            own = site.options(recipe, {**run.flags, "run_dir": _literal(root / run.name)})
            shown.append(preview(recipe, own, site, packages))
        except UsageError as error:
            wrong += [UsageError(f"{run.name}: {part.what}", part.hint) for part in parts_of(error)]
    raise_together(wrong)
    if len({run.request for run in shown}) > 1:
        separate = "its runs do not ask for the same nodes"
    else:
        separate = scheduler.no_array(shown[0].request)
    if at_once and separate:
        raise UsageError(f"--at-once {at_once} needs a job array: {separate}", "leave it out")
    if at_once >= len(runs):
        raise UsageError(f"--at-once {at_once} has no effect: there are {len(runs)} runs", "leave it out")
    return Sweep(root, tuple(shown), separate, at_once)


def submit_sweep(
    recipe: Recipe, flags: Mapping[str, Any], site: SiteProfile, runs: Sequence[GridRun], at_once: int = 0
) -> tuple[Sweep, list[SubmittedJob]]:
    """Make the directories of a sweep and its runs, and submit them; (the sweep, the job of each run).

    Args:
        flags, at_once: as for `preview_sweep`.

    Raises:
        UsageError: for what cannot run, and then nothing is left behind.
    """
    scheduler = submitter(site)
    shown = preview_sweep(recipe, flags, site, runs, at_once)
    for request in dict.fromkeys(run.request for run in shown.runs):
        refuse_unfit(scheduler, request, site)
    for run in shown.runs:
        refuse_absent_files(run)
    root = RunDir.create(shown.root, (), another="{time}" in run_dir_of(recipe, dict(flags))).root
    try:
        swept = [SweepRun(run.name, run.values) for run in runs]
        record = SweepFile(list(runs[0].values), swept, site.scheduler, submitted=time.time())
        write_sweep(root, record)
        begun = tuple(_begin(recipe, run, each, root) for run, each in zip(shown.runs, runs, strict=True))
        sweep = Sweep(root, begun, shown.separate, at_once, uuid.uuid4().hex)
        return sweep, _send(scheduler, sweep, record)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)  # nothing runs, so nothing is to be found later
        raise


def _begin(recipe: Recipe, shown: Submission, run: GridRun, root: Path) -> Submission:
    """The run directory of one run in that of its sweep."""
    own = {**shown.job.overrides, "run_dir": _literal(root / run.name)}
    job = begin_job(
        recipe, own, lambda _: shown.request.hosts(), here=False, pythonpath=shown.site.env.get("PYTHONPATH")
    )
    return dataclasses.replace(shown, job=job)


def _literal(path: Path) -> str:
    """A path as --run-dir has it: braces would be placeholders."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _send(scheduler: Scheduler, sweep: Sweep, record: SweepFile) -> list[SubmittedJob]:
    """Submit all runs, as one array, whose number the record gets, or one after another; the job of each run."""
    jobs = list[SubmittedJob]()
    with all_or_none(scheduler, jobs):
        if sweep.separate:
            for run in sweep.runs:
                jobs += send(scheduler, run)
            return jobs
        shutil.copytree(shipped("launch"), sweep.root / "launch")
        number, tasks = scheduler.submit_array(sweep.array())
        jobs += tasks
        for run, job in zip(sweep.runs, jobs, strict=True):
            note_job(run, job, sweep.root / scheduler.script_file, array=sweep.identity)
        write_sweep(sweep.root, msgspec.structs.replace(record, job_id=number))
    return jobs
