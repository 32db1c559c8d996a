"""Whether the copies of a run's custom functions can be imported, found out by importing them in a process of its own.

    python -m hpcrl.launch.code.trial_import PATH...        with HPCRL_CODE, if from copies

Done only where reading the source leaves a doubt, and only where the code can run.  Invariant: what the originals
cannot do either is no fault of the copies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrl.config.custom_functions import SNAPSHOT, load_object
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.run.code_files import use_inherited_code
from hpcrl.run.process import LATE, CommandResult, run_command

SECONDS = 60.0  #: for all functions
#: a trial on a login node takes no GPU, fetches nothing and reports to no service
QUIET = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
FAILS = 3  #: exit status if one cannot be imported


def refuse_broken_copies(folder: Path, paths: Sequence[str], pythonpath: str | None) -> str:
    """Import the functions from `folder`, RUN/code, as a role does.

    Args:
        paths: dotted.
        pythonpath: PYTHONPATH of the run's machines; None: as it is here.

    Returns:
        Why that is not known, "" if it is.

    Raises:
        UsageError: if one cannot be imported, and can from where it is.
    """
    copied = _tried(str(folder), paths, pythonpath)
    if copied.code == LATE:
        return f"importing them takes more than {SECONDS:.0f} s"
    if not copied.code:
        return ""
    original = _tried("", paths, pythonpath)
    if original.code:
        return f"the originals cannot be imported here either: {original.said}"
    raise UsageError(
        f"the copy of the custom functions cannot be imported, but the originals can: {copied.said}",
        "--live-code imports them from where they are",
    )


def _tried(folder: str, paths: Sequence[str], pythonpath: str | None) -> CommandResult:
    place = dict(os.environ) if pythonpath is None else {**os.environ, "PYTHONPATH": pythonpath}
    place.pop(SNAPSHOT, None)
    given = {SNAPSHOT: folder} if folder else {}
    return run_command([sys.executable, "-m", __name__, *paths], SECONDS, env={**place, **QUIET, **given})


def main(paths: Sequence[str]) -> int:
    """Import what the paths name, in order."""
    use_inherited_code()
    for path in paths:
        try:
            load_object(path, "the function")
        except HpcrlError as error:
            print(error.what, file=sys.stderr, flush=True)
            return FAILS
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
