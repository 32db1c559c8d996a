"""What attempts that are over have left in a run directory, kept to a few files each: a start on 512 hosts leaves some
4,000, and a run is started again tens of times.

    attempts/N/hosts, doctor, answers-*   needed at the start alone: removed when another attempt begins
    attempts/N/peers                      addresses and keys: removed when two more have begun
    timeline/attempt-N/*.jsonl            then become timeline/attempt-N.jsonl
    logs/attempt-N/*                      then become logs/attempt-N.tar.gz (report/log_archive.py)

Invariants: the last two attempts stay as they are, but for what their starts alone needed; a directory goes only once
the file with all of it is whole, on disk and in its place; nothing here ends or delays a run: what could not be done is
left to the next start.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from pathlib import Path

from hpcrl.report.log_archive import pack_logs, packed_into
from hpcrl.report.timeline.spans import FOLDER, merged_of, old_of
from hpcrl.run.rundir import RunDir, listed
from hpcrl.untrusted_files import count_of, read_regular

KEPT = 2  #: attempts that stay as they are, the one that begins among them
HALF_PACKED = re.compile(r"\.attempt-\d+\.(tar\.gz|jsonl)\.\d+")  #: names of files that are not in their places yet
START = ("hosts", "doctor")  #: directories of attempts/N that are read by its start alone, and
ANSWERS = "answers-"  #: how the names of others begin


def begin_tidying(rundir: RunDir) -> threading.Thread:
    """Tidy up after the attempts before this one, while it comes up."""
    thread = threading.Thread(target=tidy, args=(rundir,), name="tidy", daemon=True)
    thread.start()
    return thread


def tidy(rundir: RunDir) -> None:
    """Remove and pack what the attempts before `rundir.attempt` have left, and what a launcher that ended meanwhile had
    half packed."""
    for folder in (rundir.root / "logs", rundir.root / FOLDER):
        for name in filter(HALF_PACKED.fullmatch, listed(folder)):
            with contextlib.suppress(OSError):
                (folder / name).unlink()
    numbers = (count_of(name) for name in listed(rundir.root / "attempts"))
    for number in sorted(n for n in numbers if n is not None and n < rundir.attempt):
        with contextlib.suppress(OSError):
            _tidy_one(RunDir(rundir.root, number), packed=number <= rundir.attempt - KEPT)


def _tidy_one(old: RunDir, packed: bool) -> None:
    """Remove what the start of an attempt that is over left, and, if it is to be packed, pack the rest.  OSError."""
    for name in listed(old.here):
        if name in START or name.startswith(ANSWERS) or (packed and name == "peers"):
            shutil.rmtree(old.here / name)
    timelines = old.root / FOLDER / old.logs.name
    if packed and timelines.is_dir():
        merge_timelines(timelines)
    if packed and old.logs.is_dir():
        pack_logs(old.logs)


def merge_timelines(folder: Path) -> None:
    """Put the timelines of an attempt into one file, one after another, and remove their directory.

    Raises:
        OSError: then the directory is still there; one that was merged before is removed.
    """
    with packed_into(merged_of(folder), folder) as out:
        if out is not None:
            for path in _in_order(folder):
                data = read_regular(path)
                out.write(data[: data.rfind(b"\n") + 1])  # without a line that a crash has torn


def _in_order(folder: Path) -> list[Path]:
    """The files of a directory of timelines, what a process put aside before what it wrote later."""
    later = sorted(path for path in folder.glob("*.jsonl") if not path.name.endswith(".old.jsonl"))
    return [part for path in later for part in (old_of(path), path) if part.exists()]
