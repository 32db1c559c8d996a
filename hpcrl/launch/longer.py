"""A run that is to train longer than it was begun for: `hpcrl resume RUN --num-rollout N`.

Invariant: nothing else changes.  A learning rate whose curve was made for the old length is not bent: that is refused.
"""

from __future__ import annotations

import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.launch.job import Job, finished, held
from hpcrl.run.role import read_options
from hpcrl.run.rundir import RunDir, write_atomic
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


def train_longer(job: Job, num_rollout: int) -> None:
    """Let the last stage go on to `num_rollout` rollouts.  UsageError if it has not begun, has done more, or must
    not."""
    *before, last = job.recipe.stages
    directory = job.directory(last)
    if not all(finished(job.directory(stage)) for stage in before) or not (directory / "options.json").is_file():
        raise UsageError(f"{job.root} has not come to its last stage yet", "leave --num-rollout out")
    with held(job.root):
        rundir = RunDir.latest(directory)
        options, summary = read_options(rundir), read_summary(directory)
        done = summary.rollout_id if summary else 0
        if num_rollout <= done:
            raise UsageError(f"--num-rollout {num_rollout}: {done} rollouts are done", "give a larger number")
        if bent := _bent(options):
            raise UsageError(
                f"--num-rollout {num_rollout}: {bent} was laid out for the length that the run was begun with",
                f"begin another run with --load {options.save or rundir.checkpoints}",
            )
        longer = options.model_copy(update={"num_rollout": num_rollout})
        write_atomic(rundir.options_file, longer.model_dump_json(indent=1).encode())
        if summary:
            write_summary(directory, msgspec.structs.replace(summary, status="stopped", total=num_rollout))
