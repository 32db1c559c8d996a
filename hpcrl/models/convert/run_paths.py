"""Where a run has what a conversion needs.

Invariant: a directory that is no run's is an error before anything is read or written.
"""

from __future__ import annotations

from pathlib import Path

from hpcrl.errors import UsageError
from hpcrl.run.role import read_options
from hpcrl.run.rundir import TRACKER, RunDir
from hpcrl.run.started_runs import is_run


def run_places(root: Path) -> tuple[Path, Path | None, Path]:
    """(checkpoints, --hf-checkpoint, where the result goes) of a run: those of its last stage that has
    saved.

    Raises:
        UsageError: if it is not a run, or has not saved yet.
    """
    if not is_run(root):
        raise UsageError(f"{root} is not a run directory", "give --input-dir, --origin-hf-dir and --output-dir instead")
    started = [*root.glob("options.json"), *root.glob("*/options.json")]
    for stage in (path.parent for path in sorted(started, key=lambda path: path.stat().st_mtime, reverse=True)):
        options = read_options(RunDir.latest(stage))
        saved = Path(options.save) if options.save else RunDir(stage).checkpoints
        if (saved / TRACKER).is_file():
            return saved, Path(options.hf_checkpoint) if options.hf_checkpoint else None, root / "hf"
    raise UsageError(f"{root} holds no checkpoint yet", "hpcrl status says how far it is")
