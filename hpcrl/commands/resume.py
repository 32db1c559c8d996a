"""`hpcrl resume`: resume a run the way it was started.

Invariant: a run keeps the options that it began with, in the allocation that it was started in; what this
command cannot start names the command that can.
"""

from __future__ import annotations

from pathlib import Path

from hpcrl.commands.find_run import find_run
from hpcrl.commands.submit import say_submitted
from hpcrl.config.flags import parse_flags
from hpcrl.config.value_types import Kind
from hpcrl.errors import UsageError
from hpcrl.launch.extend_run import extend_run, rewind_run
from hpcrl.launch.job import finished, reopen_job
from hpcrl.launch.scheduler import load_scheduler
from hpcrl.launch.submission import submit_again
from hpcrl.run.job_files import UNQUEUED, read_job

USAGE = """\
usage: hpcrl resume RUN [--num-rollout N] [--ckpt-step N] [--time T] [--chain N] [--set KEY=VALUE ...]

  RUN                run directory, its name, or its job ID
  --num-rollout N    train longer than the run was begun for, also where it is finished: up to N rollouts in all
  --ckpt-step N      resume from this checkpoint, not from the last: one that is damaged, or later than a divergence
  --time T           time limit of one attempt: minutes, H:MM:SS or D-HH:MM:SS; only for a run that was submitted
  --chain N          N jobs, each after the one before, as for hpcrl submit
  --set KEY=VALUE    a key of the site's profile, for this start and later ones; only for a run that was submitted

The run resumes from its last checkpoint, with the options that it began with, where it ran before: as a job of the same
scheduler if it was submitted, else on this machine."""


def resume(argv: list[str]) -> int:
    """`hpcrl resume RUN`: submit the run again if a scheduler had it, else resume it here."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0
    flags = {
        "time": Kind("str"),
        "set": Kind("str", many=True),
        "chain": Kind("int", bounds=">= 1"),
        "help": Kind("bool"),
    }
    overrides, own, words = parse_flags(argv, flags)
    if len(words) != 1 or overrides.keys() - {"num_rollout", "ckpt_step"}:
        raise UsageError(
            "hpcrl resume takes one run directory",
            "a run keeps the options that it began with, but for --num-rollout and --ckpt-step",
        )
    job = reopen_job(Path(words[0]) if Path(words[0]).exists() else find_run(words[0]).root)
    root = job.root
    if "num_rollout" in overrides:
        extend_run(job, overrides["num_rollout"])
    if "ckpt_step" in overrides:
        rewind_run(job, overrides["ckpt_step"])
    if all(finished(job.directory(stage)) for stage in job.recipe.stages):
        raise UsageError(f"{root} is finished", f"train on with hpcrl resume {root} --num-rollout N")
    record = read_job(root)
    starter = record.scheduler
    if starter == "mpirun":
        raise UsageError(f"{root} ran under mpirun", f"hpcrl launch --resume {root} --hostfile FILE")
    if starter not in UNQUEUED:
        if record.site is None:
            give = f"give it to {load_scheduler(starter).submit_command} again"
            raise UsageError(
                f"{root} was started from a script", f"write --run-dir {root} into its last line, and {give}"
            )
        say_submitted(*submit_again(root, record, own, own.get("chain", 1)))
        return 0
    if own:
        raise UsageError(f"--{next(iter(own))} has no effect: {root} ran on this machine", "leave it out")
    from hpcrl.launch.local import run_recipe

    return run_recipe(None, {}, root)
