"""A job: a recipe's stages, one after another, on whatever hosts a backend brings.

    RUN/                     the run of a recipe without stages
    RUN/recipe.toml, recipe.json, prepared/, STAGE/    a recipe with stages: each stage is its own run

Invariant: a resumed run continues exactly where it stopped: finished stages are skipped, the unfinished one continues
from its last checkpoint with the options that it began with.  state.json always says what the job is doing, or did
last.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hpcrl.config.module_search import FunctionFile
from hpcrl.config.options import Options
from hpcrl.config.recipe import Recipe, Stage, files_of, load_recipe, resolve_stages
from hpcrl.config.rules.run import check_run_dir
from hpcrl.errors import HpcrlError, Interrupted, Stopped, UsageError
from hpcrl.launch.attempts.attempt import LOOK, Backend
from hpcrl.launch.attempts.host_processes import HeldHosts
from hpcrl.launch.attempts.loop import Leave, StageAttempts, stay
from hpcrl.launch.attempts.monitoring import observe
from hpcrl.launch.attempts.progress import check_headway
from hpcrl.launch.preflight import (
    NOTHING,
    HostView,
    made_by_run,
    model_notes,
    refuse_what_cannot_run,
    refuse_wrong_settings,
)
from hpcrl.launch.stop_signals import StopRequest
from hpcrl.launch.user_code.directories import commit_of
from hpcrl.launch.user_code.snapshot import begin_code, note_changed_scripts
from hpcrl.plan import Host, hosts_kept, local_hosts
from hpcrl.report.closing_line import closing_line, remarks, what_next
from hpcrl.report.page.charts import draw
from hpcrl.report.progress import AGAIN, say
from hpcrl.report.timeline.spans import PREPARE, Timeline, launcher_timeline
from hpcrl.run.code_files import CODE, RECORD
from hpcrl.run.exit_status import how_it_ended
from hpcrl.run.job_files import STOP, JobStateFile, forget_old_requests, process_age
from hpcrl.run.owners import refuse_foreign, refuse_replaceable
from hpcrl.run.peers import TrainerPeer, find
from hpcrl.run.process import adopt_orphans, end_descendants, keep_private, set_limits
from hpcrl.run.role import read_options
from hpcrl.run.rundir import FOLDERS, HALF, RunDir, write_atomic
from hpcrl.run.scratch import swept
from hpcrl.run.started_runs import COPY, LIVE, RecipeFile, is_run, read_recipe_file, remember, write_recipe_file
from hpcrl.run.summary import read_summary
from hpcrl.utils.locks import try_lock
from hpcrl.utils.untrusted_files import as_given, open_append, touch
from hpcrl.utils.waiting import LastSign


@dataclass(frozen=True)
class RunJob:
    """A recipe with the flags that were given, and the directory where it runs."""

    recipe: Recipe
    overrides: dict[str, Any]
    root: Path
    identity: str  #: of this run alone, wherever its directory is moved

    @cached_property
    def stages(self) -> tuple[Options, ...]:
        """The options of every stage, with placeholders filled in: resolved once, when they are first asked for."""
        return resolve_stages(self.recipe, self.overrides, self.places)

    @property
    def places(self) -> dict[str, str]:
        return {"run": str(self.root), "prepared": str(self.root / "prepared")}

    def directory(self, stage: Stage) -> Path:
        return self.root / stage.name if stage.name else self.root


def run_job(
    job: RunJob,
    backend: Backend,
    restarts: int = 0,
    watch: Callable[[StopRequest, RunDir | None], None] | None = None,
    ends: float | None = None,
    age: float = 0.0,
    judged: bool = False,
    begin: Callable[[], None] | None = None,
    leave: Leave = stay,
) -> int:
    """Bring a job to its end, from where it is; returns the exit status.

    Args:
        restarts: how often the scheduler has started it again.
        watch: called about five times a second; it may ask to stop.
        ends: when the allocation's time is over, in Unix seconds.
        age: seconds since this start was asked for, if that was before this process began.
        judged: whether the caller finds out, after an error, if the job is queued again, and says how it ended
            (`settle`).
        begin: see `held`.
        leave: whether a stage that has failed is left to the caller, and not tried again on the hosts of the job.

    Raises:
        HpcrlError: says what went wrong.
    """
    adopt_orphans()
    set_limits()
    with (
        StopRequest() as stop,  # before anything is said of the run: from here on Ctrl-C ends in order
        swept(),
        hold_run(job.root, begin),
        closing(launcher_timeline(job.root)) as timeline,
        JobStateFile(job.root, restarts, ends, judged) as state,
    ):
        say(f"run directory: {job.root}")
        remember(job.root)
        forget_old_requests(job.root, restarts, max(age, process_age()))
        if not judged:
            check_headway(job.root, 0)
        looked = LastSign(ago=LOOK)  # it may have been told to stop while it came up

        def turn(rundir: RunDir | None = None) -> None:
            if stop.requests and state.phase not in ("saving", "ending"):
                trains = rundir is not None and find(rundir, TrainerPeer)
                what = "ends after a checkpoint" if trains else "nothing is to be saved yet"
                why = f" ({stop.why})" if stop.why else ""
                say(f"stopping{why}: {what}; a second signal ends it without saving")
                state.beat("saving" if trains else "ending")
            state.beat()
            timeline.alive()
            if looked.due(LOOK) and (job.root / STOP).exists():
                stop.request_stop("hpcrl stop")
            if watch:
                watch(stop, rundir)
            if stop.nudges:
                stop.request_stop("SIGUSR1")

        turn()
        with timeline.span(PREPARE):
            run_prepare_commands(job, backend, stop, state, turn)
        for stage in job.recipe.stages:
            run_stage(job, stage, backend, stop, state, turn, timeline, leave)
    tell_end(job)
    return 0


def tell_end(job: RunJob) -> None:
    """What a run that is done has to say: remarks and commands on stderr, the result on stdout."""
    for stage in job.recipe.stages:
        for remark in remarks(job.directory(stage)):
            say(f"note: {f'stage {stage.name}: ' if stage.name else ''}{remark}")
    last = job.directory(job.recipe.stages[-1])
    for line in what_next(job.stages[-1], last, job.root):
        say(line)
    print(closing_line(last, job.root), flush=True)


@contextmanager
def hold_run(root: Path, begin: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the run directory.

    Args:
        begin: called once no other process can run in it.

    Raises:
        UsageError: if another process runs in it. The kernel lets go when we end, however.
    """
    with open_append(root / "lock") as file:
        if not try_lock(file, lambda why: say(f"note: {root} cannot be locked ({why}); start nothing else in it")):
            file.seek(0)
            holder = file.read(20).decode(errors="replace").strip() or "?"
            raise UsageError(f"{root} is in use by process {holder}", "wait for it, or stop it first")
        file.truncate(0)
        file.write(str(os.getpid()).encode())
        file.flush()
        if begin:
            begin()
        yield


# ---- beginning, and beginning again


def begin_job(
    recipe: Recipe,
    overrides: dict[str, Any],
    hosts: Callable[[Options], list[Host]] = local_hosts,
    here: bool = True,
    pythonpath: str | None = None,
) -> RunJob:
    """A new run directory for the recipe; every stage is checked, also against its hosts, before anything is made, and
    nothing is left of one that cannot begin.

    Args:
        here: whether this machine is one of the run's, with the files that it begins with and the packages that it runs
            with.
        pythonpath: see `begin_code`.
    """
    root = directory_of(recipe, overrides)
    job = RunJob(recipe, overrides, root, uuid.uuid4().hex)
    sight = HostView(lambda path: made_by_run(recipe, str(root), path)) if here else NOTHING
    refuse_what_cannot_run(job.stages, hosts, sight, packages=here)
    alone = recipe.stages[0].name == ""
    absent = not os.path.lexists(root)
    keep_private()
    root = RunDir.create(root, FOLDERS if alone else ("logs",), another="{time}" in run_dir_of(recipe, overrides)).root
    refuse_foreign(root)  # as each of its processes will, where a volume shows another owner than its user
    made = absent or root != job.root
    job = replace(job, root=root) if root != job.root else job
    for line in model_notes(job.stages):
        say(f"note: {line}")
    try:
        commands = recipe.prepare_commands(root, job.overrides)
        begin_code(root, job.stages, commands, as_given(recipe.path.parent), pythonpath)
        files = files_of(recipe, job.overrides, job.places)
        commit = commit_of(recipe.path.parent)
        begun = RecipeFile(job.identity, str(recipe.path), job.overrides, commit, files)  # type: ignore[arg-type]
        write_recipe_file(root, begun, recipe.text)
    except BaseException:
        _discard(root, made)
        raise
    return job


def _discard(root: Path, made: bool) -> None:
    """Remove a run directory that has not begun; one that was there before, and empty, is empty again."""
    for path in [root] if made else list(root.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def discard_unbegun(root: Path) -> None:
    """Empty a directory in which there is nothing but what `begin_job` makes, if it was killed before the run had
    begun."""
    if not root.is_dir() or is_run(root):
        return
    for path in root.iterdir():
        half = HALF.fullmatch(path.name)
        if (half[1] if half else path.name) not in {*FOLDERS, CODE, RECORD, LIVE, COPY}:
            return
        if path.name in FOLDERS and any(path.iterdir()):
            return
    _discard(root, made=False)


def run_dir_of(recipe: Recipe, overrides: dict[str, Any]) -> str:
    """--run-dir as it was given, with its braces replaced."""
    return overrides.get("run_dir") or recipe.values.get("run_dir") or Options.model_fields["run_dir"].default


def directory_of(recipe: Recipe, overrides: dict[str, Any]) -> Path:
    """Where a run of the recipe that begins now would be."""
    given = run_dir_of(recipe, overrides)
    check_run_dir(given, recipe.name)
    path = given.format(name=recipe.name, time=time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
    refuse_foreign(Path(path))  # a link too, which is followed from here on
    return as_given(path)


def reopen_job(root: Path) -> RunJob:
    """The job of an existing run directory, to be run.

    Raises:
        UsageError: if there is no such, or it is not this user's own.
    """
    refuse_foreign(root)
    refuse_replaceable(root)
    begun = read_recipe_file(root)
    files = {text: FunctionFile(*file) for text, file in begun.files.items()}
    recipe = replace(load_recipe(root / COPY, origin=Path(begun.path)), files=files)
    return RunJob(recipe, begun.overrides, as_given(root), begun.identity)


# ---- before the first stage


def run_prepare_commands(
    job: RunJob, backend: Backend, stop: StopRequest, state: JobStateFile, turn: Callable[[], None]
) -> None:
    """Run the recipe's prepare commands once.

    Raises:
        HpcrlError: names the command and its log.
    """
    done = job.root / "prepared" / ".done"
    if not job.recipe.prepare or done.exists() or stop.requests:
        return
    say("preparing")
    note_changed_scripts(job.root)
    state.set("preparing")
    shutil.rmtree(job.root / "prepared", ignore_errors=True)
    done.parent.mkdir()
    log, told = job.root / "logs" / "prepare.log", LastSign()
    for command in job.recipe.prepare_commands(job.root, job.overrides, backend.python):
        process = backend.prepare(command, log)
        while process.poll() is None and not stop.requests:
            turn()
            if told.due(AGAIN):
                say(f"still preparing: {shlex.join(command)}")
            time.sleep(0.05)
        end_descendants(2.0)
        if stop.requests:
            raise Stopped("stopped while preparing", f"continue with {backend.again(job.root)}")
        if process.returncode:
            raise HpcrlError(f"prepare command {' '.join(command)} {how_it_ended(process.returncode)}", f"see {log}")
    touch(done)


# ---- one stage


def run_stage(
    job: RunJob,
    stage: Stage,
    backend: Backend,
    stop: StopRequest,
    state: JobStateFile,
    turn: Callable[[RunDir], None],
    timeline: Timeline,
    leave: Leave,
) -> None:
    """Bring one stage to its end, from where it is; Stopped if the user stopped it before."""
    directory = job.directory(stage)
    if finished(directory):
        return
    if stop.requests:
        before, reason = (
            f"before stage {stage.name}" if stage.name else "while starting",
            f" ({stop.why})" if stop.why else "",
        )
        raise Stopped(f"stopped {before}{reason}", f"continue with {backend.again(job.root)}")
    rundir, options = open_stage(job, stage, directory)

    @contextmanager
    def observed(rundir: RunDir) -> Iterator[Callable[[], None]]:
        with observe(rundir, stage, stage.name or job.recipe.name, options.num_rollout, state, timeline) as progress:
            yield lambda: (progress(), turn(rundir))[1]

    run_id = f"{job.identity}/{stage.name}"
    try:
        held = HeldHosts(kept=hosts_kept(job.stages))
        summary = StageAttempts(options, backend, run_id, job.root, stop, observed, turn, leave, held).run(rundir)
    except Stopped as error:
        kind = Interrupted if stop.requests > 1 else type(error)
        raise kind(error.what, error.hint or f"continue with {backend.again(job.root)}") from error
    finally:
        with contextlib.suppress(Exception):  # a picture must never hide how the run ended, nor keep who waits for it
            if stop.requests < 2:
                draw(rundir, " / ".join(filter(None, [job.root.name, stage.name])))
    if not summary.finished:
        where = f"after {summary.rollout_id} of {summary.total} rollouts"
        reason = f" ({stop.why})" if stop.why else ""
        raise Stopped(f"saved and stopped {where}{reason}", f"continue with {backend.again(job.root)}")


def finished(directory: Path) -> bool:
    """Whether the stage has run to its end."""
    summary = read_summary(directory)
    return summary is not None and summary.finished


def open_stage(job: RunJob, stage: Stage, directory: Path) -> tuple[RunDir, Options]:
    """The stage's next attempt, and its options: those it began with, if it has begun."""
    if (directory / "options.json").is_file():
        last = RunDir.latest(directory)
        following = RunDir(directory, last.attempt + last.here.exists())
        return following, read_options(following)
    options = job.stages[job.recipe.stages.index(stage)]
    refuse_wrong_settings([options], same_packages=False)  # the model is prepared by now
    if directory == job.root:
        rundir = RunDir(directory)
    else:
        shutil.rmtree(directory, ignore_errors=True)  # without options it had not begun: a crash left it half made
        rundir = RunDir.create(directory)
    write_atomic(rundir.options_file, options.model_dump_json(indent=1).encode())
    return rundir, options
