"""The runs of a sweep as one job array of a scheduler, or one job each where there can be no array.

Invariants: all runs are checked as if each were submitted alone before anything is made, and no two of them write to
the same place or are the same run; either all of them are submitted, or none, and then nothing is left behind.  Each
run is a run like any other, in its own directory.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.config.recipe import Recipe
from hpcrl.config.stage_flags import stage_flag
from hpcrl.config.sweep import GridRun
from hpcrl.errors import UsageError, parts_of, raise_together
from hpcrl.launch.code.snapshot import function_paths
from hpcrl.launch.job import directory_of, run_dir_of
from hpcrl.launch.preflight import begins_with, writes_to
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
from hpcrl.launch.stop_signals import HeldSignals
from hpcrl.launch.submission import (
    all_or_none,
    begin_submission,
    note_job,
    preview,
    refuse_absent_files,
    refuse_unfit,
    removed_on_error,
    send,
    submitter,
)
from hpcrl.run.process import keep_private
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
    _refuse_same(runs, shown)
    _refuse_shared(runs, shown)
    if len({(run.request, run.tasks()) for run in shown}) > 1:
        separate = "its runs do not ask for the same nodes, or not for the same tasks on them"
    else:
        separate = scheduler.no_array(shown[0].request)
    if at_once and separate:
        raise UsageError(f"--at-once {at_once} needs a job array: {separate}", "leave it out")
    if at_once >= len(runs):
        raise UsageError(f"--at-once {at_once} has no effect: there are {len(runs)} runs", "leave it out")
    return Sweep(root, tuple(shown), separate, at_once)


def _refuse_same(runs: Sequence[GridRun], shown: Sequence[Submission]) -> None:
    """Raise UsageError for a run whose options are those of another."""
    known: dict[str, str] = {}
    for run, submission in zip(runs, shown, strict=True):
        options = repr([stage.model_dump(exclude={"run_dir"}) for stage in submission.stages])  # nan is like nan
        if (first := known.setdefault(options, run.name)) != run.name:
            raise UsageError(f"runs {first} and {run.name} have the same options", "sweep values that differ")


def _refuse_shared(runs: Sequence[GridRun], shown: Sequence[Submission]) -> None:
    """Raise UsageError for an option by which one run writes where another writes, or finds what it begins with."""
    owners: dict[str, str] = {}
    hint = "write {run}/...: {run} is each run's own directory"
    for run, submission in zip(runs, shown, strict=True):
        for stage, options in zip(submission.job.recipe.stages, submission.stages, strict=True):
            for option, path in writes_to(options):
                owner = owners.setdefault(_place(path, submission), run.name)
                if owner != run.name:
                    what = f"{stage_flag(stage.name, option)} {path}"
                    raise UsageError(f"{what}: runs {owner} and {run.name} would both write to it", hint)
    for run, submission in zip(runs, shown, strict=True):
        for flag, path in (row for options in submission.stages for row in begins_with(options)):
            owner = owners.get(_place(path, submission), run.name)
            if owner != run.name:
                raise UsageError(f"{flag} {path}: run {owner} would write what run {run.name} begins with", hint)


def _place(path: str, submission: Submission) -> str:
    """A path of a previewed run's options as it will be."""
    return os.path.realpath(path.replace("{run}", str(submission.job.root)))


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
    keep_private()
    with HeldSignals() as signals:
        root = RunDir.create(shown.root, (), another="{time}" in run_dir_of(recipe, dict(flags))).root
        with removed_on_error(root):
            swept = [SweepRun(run.name, run.values) for run in runs]
            record = SweepFile(list(runs[0].values), swept, site.scheduler, submitted=time.time())
            write_sweep(root, record)
            identity, begun, tried = uuid.uuid4().hex, list[Submission](), set[frozenset[str]]()
            for run, each in zip(shown.runs, runs, strict=True):
                signals.check()
                own = {**run.job.overrides, "run_dir": _literal(root / each.name)}
                functions = frozenset(path for options in run.stages for path in function_paths(options))
                array = "" if shown.separate else identity
                begun.append(begin_submission(recipe, own, run, array, again=functions in tried))
                tried.add(functions)
            signals.check()
            sweep = Sweep(root, tuple(begun), shown.separate, at_once, identity)
            return sweep, _send(scheduler, sweep, record)


def _literal(path: Path) -> str:
    """A path as --run-dir has it: braces would be placeholders."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _send(scheduler: Scheduler, sweep: Sweep, record: SweepFile) -> list[SubmittedJob]:
    """Submit all runs, as one array, whose number the record gets, or one after another; the job of each run."""
    jobs = list[SubmittedJob]()
    with all_or_none(scheduler, jobs) as signals:
        if sweep.separate:
            for run in sweep.runs:
                jobs += send(scheduler, run)
                signals.check()
            return jobs
        shutil.copytree(shipped("launch"), sweep.root / "launch")
        number, tasks = scheduler.submit_array(sweep.array())
        jobs += tasks
        signals.check()
        for run, job in zip(sweep.runs, jobs, strict=True):
            note_job(run, job, sweep.root / scheduler.script_file, array=sweep.identity)
        write_sweep(sweep.root, msgspec.structs.replace(record, job_id=number))
    return jobs
