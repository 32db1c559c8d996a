"""A run that is to go on from an earlier checkpoint than its last: `hpcrl resume RUN --ckpt-step N`.

Invariant: nothing is removed; the tracker names the earlier checkpoint, and what the run saves from there on takes the
place of later ones.
"""

from __future__ import annotations

from pathlib import Path

from hpcrl.errors import UsageError
from hpcrl.launch.job import Job, finished, held
from hpcrl.model_files.torch_dist import step
from hpcrl.run.role import read_options
from hpcrl.run.rundir import TRACKER, RunDir, write_atomic


def go_back(job: Job, number: int) -> None:
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
