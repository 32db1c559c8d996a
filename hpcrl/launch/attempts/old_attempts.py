"""What attempts that are over have left in a run directory, thinned out: a start on 512 hosts leaves some 4,000 files,
and a run is started again tens of times.

    attempts/N/hosts, doctor, answers-*   needed at the start alone: removed when another attempt begins
    attempts/N/peers                      addresses and keys: removed when two more have begun
    timeline/attempt-N/*.jsonl            then become timeline/attempt-N.jsonl

Invariants: the last two attempts stay as they are, but for what their starts alone needed; a directory goes only once
the file with all of it is whole, on disk and in its place; nothing here ends or delays a run: what could not be done is
left to the next start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path

from hpcrl.report.timeline.spans import FOLDER, merged_of, old_of
from hpcrl.run.rundir import RunDir, listed
from hpcrl.utils.untrusted_files import count_of, open_append, read_regular

KEPT = 2  #: attempts that stay as they are, the one that begins among them
START = ("hosts", "doctor")  #: directories of attempts/N that are read by its start alone, and
ANSWERS = "answers-"  #: how the names of others begin


def begin_tidying(rundir: RunDir) -> threading.Thread:
    """Tidy up after the attempts before this one, while it comes up."""
    thread = threading.Thread(target=tidy, args=(rundir,), name="tidy", daemon=True)
    thread.start()
    return thread


def tidy(rundir: RunDir) -> None:
    """Remove and merge what the attempts before `rundir.attempt` have left."""
    numbers = (count_of(name) for name in listed(rundir.root / "attempts"))
    for number in sorted(n for n in numbers if n is not None and n < rundir.attempt):
        with contextlib.suppress(OSError):
            _tidy_one(RunDir(rundir.root, number), merged=number <= rundir.attempt - KEPT)


def _tidy_one(old: RunDir, merged: bool) -> None:
    """Remove what the start of an attempt that is over left; of one further back its peers too, and merge its
    timelines.  OSError."""
    for name in listed(old.here):
        if name in START or name.startswith(ANSWERS) or (merged and name == "peers"):
            shutil.rmtree(old.here / name)
    timelines = old.root / FOLDER / old.logs.name
    if merged and timelines.is_dir():
        merge_timelines(timelines)


def merge_timelines(folder: Path) -> None:
    """Put the timelines of an attempt into one file, one after another, and remove their directory.

    Raises:
        OSError: then the directory is still there; one that was merged before is removed.
    """
    place = merged_of(folder)
    if not place.exists():
        beside = place.with_name(f".{place.name}")
        beside.unlink(missing_ok=True)  # of a launcher that ended meanwhile
        with open_append(beside) as out:
            for path in _in_order(folder):
                data = read_regular(path)
                out.write(data[: data.rfind(b"\n") + 1])  # without a line that a crash has torn
            out.flush()
            os.fsync(out.fileno())
        beside.replace(place)
    shutil.rmtree(folder)


def _in_order(folder: Path) -> list[Path]:
    """The files of a directory of timelines, what a process put aside before what it wrote later."""
    later = sorted(path for path in folder.glob("*.jsonl") if not path.name.endswith(".old.jsonl"))
    return [part for path in later for part in (old_of(path), path) if part.exists()]
