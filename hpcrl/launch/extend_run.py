"""What `hpcrl resume` may change of a run: how long it trains (--num-rollout) and from which checkpoint (--ckpt-step).

Invariants: nothing else changes, and nothing is removed.  A learning-rate schedule that was made for the old length is
not
stretched: that is refused.  The tracker names the earlier checkpoint, and what the run saves from there on replaces the
later ones.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.launch.job import RunJob, finished, held
from hpcrl.model_files.torch_dist import step
from hpcrl.run.role import read_options
from hpcrl.run.rundir import TRACKER, RunDir, write_atomic
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


def extend_run(job: RunJob, num_rollout: int) -> None:
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


def rewind_run(job: RunJob, number: int) -> None:
    """Have the stage at work go on from checkpoint `number`.  UsageError if it has none of that number."""
    stage = next((stage for stage in job.recipe.stages if not finished(job.directory(stage))), None)
    if stage is None or not (job.directory(stage) / "options.json").is_file():
        raise UsageError(f"{job.root} has no stage that could go on from a checkpoint", "leave --ckpt-step out")
    with held(job.root):
        rundir = RunDir.latest(job.directory(stage))
        directory = Path(read_options(rundir).save or rundir.checkpoints)
        if not step(directory, number).is_dir():
            there = ", ".join(str(int(path.name[5:])) for path in sorted(directory.glob("iter_*"))) or "none"
            raise UsageError(f"--ckpt-step {number}: {directory} has no such checkpoint", f"there are {there}")
        write_atomic(directory / TRACKER, str(number).encode(), mode=0o644)
