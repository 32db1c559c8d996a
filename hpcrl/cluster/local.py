"""`hpcrl run`: a recipe's stages, one after another, as local processes of this machine.

    RUN/                     the run of a recipe without stages
    RUN/recipe.toml, recipe.json, prepared/, STAGE/    a recipe with stages: each stage is a run of its own

Invariant: a resumed run goes on exactly where it stopped: finished stages are skipped, the unfinished one continues from
its last checkpoint with the options that it began with.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.cluster.attempt import Stop, environment, run_attempt
from hpcrl.errors import HpcrlError, Stopped, UsageError
from hpcrl.flags import Recipe, Stage, load_recipe, resolve
from hpcrl.options import Options
from hpcrl.plan import local_hosts, make_plan
from hpcrl.process import adopt_orphans, end_descendants
from hpcrl.queue.auth import make_keys
from hpcrl.report.picture import draw
from hpcrl.report.progress import Progress
from hpcrl.report.summary import closing_line
from hpcrl.roles import read_options
from hpcrl.rundir import FOLDERS, RunDir, write_atomic


@dataclass(frozen=True)
class Job:
    """A recipe with the flags that were given, and the directory where it runs."""

    recipe: Recipe
    overrides: dict[str, Any]
    root: Path
    identity: str  #: of this run alone, wherever its directory is moved

    def options(self, stage: Stage) -> Options:
        """The stage's options, with placeholders filled in."""
        places = {"run": str(self.root), "prepared": str(self.root / "prepared")}
        return resolve(self.recipe, stage, self.overrides, places)

    def directory(self, stage: Stage) -> Path:
        return self.root / stage.name if stage.name else self.root


def run_recipe(recipe: Recipe | None, overrides: dict[str, Any], resume: Path | None) -> int:
    """Start a recipe anew, or go on with a run; returns the exit status.  HpcrlError says what went wrong."""
    job = reopen(resume) if resume else begin(recipe, overrides)
    say(f"run directory: {job.root}")
    adopt_orphans()
    with held(job.root), Stop() as stop:
        prepare(job, stop)
        for stage in job.recipe.stages:
            run_stage(job, stage, stop)
    print(closing_line(job.directory(job.recipe.stages[-1]), job.root), flush=True)
    return 0


@contextmanager
def held(root: Path) -> Iterator[None]:
    """Hold the run directory; UsageError if another process runs in it.  The kernel lets go when we end, however."""
    with (root / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise UsageError(
                f"{root} is in use by process {file.read().strip() or '?'}", "wait for it, or stop it first"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def say(text: str) -> None:
    print(f"hpcrl: {text}", file=sys.stderr, flush=True)


# ---- beginning, and beginning again


def begin(recipe: Recipe | None, overrides: dict[str, Any]) -> Job:
    """A new run directory for the recipe; every stage's options are checked before anything is made."""
    assert recipe is not None
    given = overrides.get("run_dir") or recipe.values.get("run_dir") or Options.model_fields["run_dir"].default
    root = Path(given.format(name=recipe.name, time=time.strftime("%Y%m%d-%H%M%S", time.gmtime()))).resolve()
    job = Job(recipe, overrides, root, uuid.uuid4().hex)
    for stage in recipe.stages:
        options = job.options(stage)
        make_plan(options, local_hosts(options), "check")
    alone = recipe.stages[0].name == ""
    RunDir.create(root, FOLDERS if alone else ("logs",))
    shutil.copyfile(recipe.path, root / "recipe.toml")
    write_atomic(
        root / "recipe.json", msgspec.json.encode({"path": str(recipe.path), "overrides": overrides, "identity": job.identity})
    )
    return job


def reopen(root: Path) -> Job:
    """The job of an existing run directory."""
    if not (root / "recipe.json").is_file():
        raise UsageError(
            f"--resume {root}: no run directory (it has no recipe.json)", "name the directory that hpcrl run printed"
        )
    try:
        saved = msgspec.json.decode((root / "recipe.json").read_bytes())
    except msgspec.DecodeError as error:
        raise UsageError(f"{root / 'recipe.json'} is damaged: {error}", "start the recipe anew") from error
    recipe = load_recipe(root / "recipe.toml", origin=Path(saved["path"]))
    return Job(recipe, saved["overrides"], root.resolve(), saved["identity"])


# ---- before the first stage


def prepare(job: Job, stop: Stop) -> None:
    """Run the recipe's prepare commands once; HpcrlError names the command and its log."""
    done = job.root / "prepared" / ".done"
    if not job.recipe.prepare or done.exists():
        return
    say("preparing")
    shutil.rmtree(job.root / "prepared", ignore_errors=True)
    done.parent.mkdir()
    log = job.root / "logs" / "prepare.log"
    for command in job.recipe.prepare_commands(job.root, job.overrides):
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "hpcrl.process", *command],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            while process.poll() is None and not stop.requests:
                time.sleep(0.05)
        end_descendants(2.0)
        if stop.requests:
            raise Stopped("stopped while preparing", f"continue with hpcrl run --resume {job.root}")
        if process.returncode:
            raise HpcrlError(f"prepare command {' '.join(command)} ended with exit code {process.returncode}", f"see {log}")
    done.touch()


# ---- one stage


def run_stage(job: Job, stage: Stage, stop: Stop) -> None:
    """Bring one stage to its end, from where it stands; Stopped if the user stopped it before."""
    directory = job.directory(stage)
    if finished(directory):
        return
    if stop.requests:
        raise Stopped(f"stopped before stage {stage.name}", f"continue with hpcrl run --resume {job.root}")
    rundir, options = open_stage(job, stage, directory)
    plan = make_plan(options, local_hosts(options), run_id=f"{job.identity}/{stage.name}", attempt=rundir.attempt)
    rundir.begin()
    write_atomic(rundir.plan_file, msgspec.json.encode(plan))
    make_keys(rundir, options.data_parallel_size)
    try:
        with closing(Progress(rundir, stage.name or job.recipe.name, options.num_rollout)) as progress:
            summary = run_attempt(options, plan, rundir, stop, progress.poll)
    finally:
        with contextlib.suppress(Exception):  # a picture must never hide how the run ended
            draw(rundir, " / ".join(filter(None, [job.root.name, stage.name])))
    if summary["status"] != "finished":
        where = f"after {summary['rollout_id']} of {summary['total']} rollouts"
        raise Stopped(f"saved and stopped {where}", f"continue with hpcrl run --resume {job.root}")


def finished(directory: Path) -> bool:
    """Whether the stage has run to its end."""
    try:
        return msgspec.json.decode((directory / "summary.json").read_bytes()).get("status") == "finished"
    except FileNotFoundError:
        return False


def open_stage(job: Job, stage: Stage, directory: Path) -> tuple[RunDir, Options]:
    """The stage's next attempt, and its options: those it began with, if it has begun."""
    if (directory / "options.json").is_file():
        last = RunDir.latest(directory)
        return RunDir(directory, last.attempt + last.here.exists()), read_options(last)
    options = job.options(stage)
    if directory == job.root:
        rundir = RunDir(directory)
    else:
        shutil.rmtree(directory, ignore_errors=True)  # without options it had not begun: a crash left it half made
        rundir = RunDir.create(directory)
    write_atomic(rundir.options_file, options.model_dump_json(indent=1).encode())
    return rundir, options
