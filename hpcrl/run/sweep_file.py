"""What a sweep's directory holds in addition to its runs.

    SWEEP/sweep.json                 what is swept, which runs there are, and the number of their job array
    SWEEP/lr=1e-06,seed=2/           a run directory like any other, one for each combination
    SWEEP/job.sbatch, launch/, submitit/, tasks/    of the array: its script, and what its tasks are started with

Invariants: sweep.json is there before the first run is submitted, and gets the array's number when all have been; a
directory with this file is a sweep's.  A run knows nothing of its sweep: what becomes of it (its job, its state) is in
its own directory alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.run.rundir import write_atomic
from hpcrl.untrusted_files import Damaged, read_json

SWEEP = "sweep.json"  #: its name in a sweep's directory
STARTED_WITH = ("launch", "submitit", "tasks")  #: directories there that are of its array


class SweepRun(msgspec.Struct, frozen=True):
    """One run of a sweep.

    Attributes:
        name: of its directory.
        values: by swept option.
    """

    name: str
    values: dict[str, Any]


class SweepFile(msgspec.Struct, frozen=True):
    """What it holds.

    Attributes:
        swept: the options, as flags have them, without dashes.
        runs: all of them, in the order of the array's tasks.
        scheduler: its name.
        job_id: the number of the job array; "" where each run is a job of its own.
        submitted: unix time.
    """

    swept: list[str]
    runs: list[SweepRun]
    scheduler: str
    job_id: str = ""
    submitted: float = 0.0

    def roots(self, root: Path) -> list[Path]:
        """The runs' directories in that of the sweep; a name that leads elsewhere is none."""
        return [root / run.name for run in self.runs if Path(run.name).name == run.name]


def is_sweep(root: Path) -> bool:
    """Whether `root` is the directory of a sweep.

    Raises:
        OSError: if it may not be looked into.
    """
    return (root / SWEEP).is_file()


def write_sweep(root: Path, sweep: SweepFile) -> None:
    """Write sweep.json."""
    write_atomic(root / SWEEP, msgspec.json.encode(sweep))


def read_sweep(root: Path) -> SweepFile:
    """sweep.json of a sweep's directory.

    Raises:
        HpcrlError: names a file that is missing or damaged.
    """
    try:
        return read_json(root / SWEEP, SweepFile)
    except (OSError, Damaged) as error:
        raise HpcrlError(f"{root / SWEEP} cannot be read: {error}", "name the directory of one of its runs") from error


def remove_empty_sweep(root: Path, script: str) -> None:
    """Remove a sweep none of whose runs is there any more; what hpcrl has not put into its directory stays.

    Args:
        script: name of the array's script.

    Raises:
        HpcrlError: if sweep.json cannot be read.
    """
    if any(os.path.lexists(path) for path in read_sweep(root).roots(root)):
        return
    for name in STARTED_WITH:
        shutil.rmtree(root / name, ignore_errors=True)
    for name in (script, SWEEP):
        (root / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else is there
        root.rmdir()
