"""`hpcrl resume`: resume a run the way it was started, for longer (--num-rollout) or from an earlier checkpoint
(--ckpt-step).

Invariants: a run keeps the options that it began with, in the allocation that it was started in; what this command
cannot start names the command that can.  Nothing else changes, and nothing is removed: a learning-rate schedule that
was made for the old length is not stretched, but refused; the tracker names the earlier checkpoint, and what the run
saves from there on replaces the later ones.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcrl.cli.find_run import find_run
from hpcrl.cli.submit import say_submitted
from hpcrl.config.flags import parse_flags
from hpcrl.config.options import Options
from hpcrl.config.value_types import Kind
from hpcrl.errors import UsageError
from hpcrl.launch.job import RunJob, finished, hold_run, reopen_job
from hpcrl.launch.slurm.submission import submit_again
from hpcrl.run.job_files import read_job
from hpcrl.run.role import read_options
from hpcrl.run.rundir import CHOSEN, TRACKER, RunDir, write_atomic
from hpcrl.run.summary import read_summary, write_summary


def _bent(options: Options) -> str:
    """The flag of what was laid out for the run's length, or ""."""
    if options.lr_decay_iters is not None:
        return ""
    if options.lr_decay_style != "constant":
        return f"--lr-decay-style {options.lr_decay_style}"
    if options.lr_warmup_fraction is not None:
        return "--lr-warmup-fraction"
    return "--weight-decay-incr-style" if options.weight_decay_incr_style != "constant" else ""


def extend_run(job: RunJob, num_rollout: int, ckpt_step: int | None = None) -> None:
    """Let the last stage continue to `num_rollout` rollouts.

    Args:
        ckpt_step: the checkpoint that it is to go back to first.

    Raises:
        UsageError: if it has not begun, has done more, or must not.
    """
    *before, last = job.recipe.stages
    directory = job.directory(last)
    if not all(finished(job.directory(stage)) for stage in before) or not (directory / "options.json").is_file():
        what = "reached its last stage" if before else "begun"
        raise UsageError(f"{job.root} has not {what} yet", "leave --num-rollout out")
    with hold_run(job.root):
        rundir = RunDir.latest(directory)
        options = read_options(rundir)
        summary = read_summary(directory)
        done = ckpt_step or (summary.rollout_id if summary else 0)
        if num_rollout <= done:
            raise UsageError(f"--num-rollout {num_rollout}: {done} rollouts are done", "give a larger number")
        if bent := _bent(options):
            raise UsageError(
                f"--num-rollout {num_rollout}: {bent} was planned for the run's original length",
                f"start another run with --load {options.save or rundir.checkpoints}",
            )
        if ckpt_step is not None:
            _checkpoints(rundir, options, ckpt_step)
        longer = options.model_copy(update={"num_rollout": num_rollout})
        write_atomic(rundir.options_file, longer.model_dump_json(indent=1).encode())
        if summary:
            write_summary(directory, msgspec.structs.replace(summary, status="stopped", total=num_rollout))


def _checkpoints(rundir: RunDir, options: Options, number: int) -> Path:
    """Where the run has its checkpoints, of which `number` is one.

    Raises:
        UsageError: if there is none of that number; names those that there are.
    """
    from hpcrl.models.files.torch_dist import step  # with torch, which no other way to resume needs

    directory = Path(options.save or rundir.checkpoints)
    if not step(directory, number).is_dir():
        there = ", ".join(str(int(path.name[5:])) for path in sorted(directory.glob("iter_*"))) or "none"
        raise UsageError(f"--ckpt-step {number}: {directory} has no such checkpoint", f"there are {there}")
    return directory


def rewind_run(job: RunJob, number: int) -> None:
    """Have the current stage resume from checkpoint `number`.

    Raises:
        UsageError: if it has none of that number.
    """
    stage = next((stage for stage in job.recipe.stages if not finished(job.directory(stage))), None)
    if stage is None:
        raise UsageError(f"--ckpt-step {number}: {job.root} is finished", "give --num-rollout N too")
    if not (job.directory(stage) / "options.json").is_file():
        raise UsageError(f"{job.root} has saved nothing yet", "leave --ckpt-step out")
    with hold_run(job.root):
        rundir = RunDir.latest(job.directory(stage))
        directory = _checkpoints(rundir, read_options(rundir), number)
        write_atomic(directory / CHOSEN, str(number).encode(), mode=0o644)  # if it is damaged, no other is taken
        write_atomic(directory / TRACKER, str(number).encode(), mode=0o644)


USAGE = """\
usage: hpcrl resume RUN [--num-rollout N] [--ckpt-step N] [--live-code] [--time T] [--chain N] [--set KEY=VALUE ...]

  RUN                run directory, its name, or its job ID
  --num-rollout N    train to N rollouts in all, also after the run has finished
  --ckpt-step N      resume from this checkpoint, if the last is damaged or diverged
  --live-code        from now on import custom functions from their own directories, not from RUN/code;
                     --no-live-code: from the copies again
  --time T           time limit of one attempt: minutes, H:MM:SS or D-HH:MM:SS; only for a run that was submitted
  --chain N          N jobs in a row, as for hpcrl submit
  --set KEY=VALUE    a key of the site's profile, for this start and later ones; only for a run that was submitted

The run continues from its last checkpoint with its own options: as a job of the same site if it was submitted, else on
this machine."""


def resume(argv: list[str]) -> int:
    """`hpcrl resume RUN`: submit the run again if it was a Slurm job, else resume it here."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0
    flags = {
        "time": Kind("str"),
        "set": Kind("str", many=True),
        "chain": Kind("int", bounds=">= 1"),
        "help": Kind("bool"),
    }
    taken = {"num_rollout", "ckpt_step", "live_code"}
    overrides, own, words = parse_flags(argv, flags, only=taken)
    if len(words) != 1 or overrides.keys() - taken:
        raise UsageError(
            "hpcrl resume takes one run directory",
            "only --num-rollout, --ckpt-step and --live-code can change; to change others, start a new run from its "
            "weights: hpcrl run RECIPE.toml --load RUN/checkpoints",
        )
    job = reopen_job(Path(words[0]) if Path(words[0]).exists() else find_run(words[0]).root)
    root = job.root
    if "num_rollout" in overrides:
        extend_run(job, overrides["num_rollout"], overrides.get("ckpt_step"))
    if "ckpt_step" in overrides:
        rewind_run(job, overrides["ckpt_step"])
    if all(finished(job.directory(stage)) for stage in job.recipe.stages):
        raise UsageError(f"{root} is finished", f"train on with hpcrl resume {root} --num-rollout N")
    record = read_job(root)
    if record.scheduler == "mpirun":
        raise UsageError(f"{root} ran under mpirun", f"hpcrl launch --resume {root} --hostfile FILE")
    if record.queued:
        if record.site is None:
            raise UsageError(
                f"{root} was started from a script",
                f"submit it again with that directory: sbatch SCRIPT --run-dir {root}",
            )
        say_submitted(*submit_again(root, record, own, own.get("chain", 1), overrides.get("live_code")))
        return 0
    if own:
        raise UsageError(f"--{next(iter(own))} has no effect: {root} ran on this machine", "leave it out")
    from hpcrl.launch.local import run_recipe

    return run_recipe(None, overrides, root)
