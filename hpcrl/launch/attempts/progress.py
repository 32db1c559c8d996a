"""Whether a run that is started again and again gets anywhere.

Invariant: a run that has failed in FRUITLESS attempts one after another without a new checkpoint, on disk or in memory,
is not restarted automatically, neither in its job nor in another.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from hpcrl.errors import HpcrlError
from hpcrl.report.progress import say
from hpcrl.run.attempt_log import ATTEMPTS, ReadyRecord, read_attempts
from hpcrl.run.rundir import TRACKER, write_atomic
from hpcrl.run.summary import SUMMARY, read_summary
from hpcrl.utils.untrusted_files import Damaged, read_json, read_regular

HEADWAY = "headway.json"  #: in a run directory: where the last starts were
FRUITLESS = 5  # preemptions in a row are no failure of the run, but as many as this bring it nowhere


def position(root: Path) -> list[str]:
    """What a job has saved so far: the tracker of every stage, which stages are finished, and where the last attempt
    began to train if that was beyond the checkpoint: from a copy in memory."""
    found: list[str] = []
    saved: dict[Path, int] = {}
    for path in sorted(root.glob(f"**/{TRACKER}")):
        with contextlib.suppress(OSError):
            number = read_regular(path).decode(errors="replace").strip()
            saved[path] = int(number) if number.isdecimal() else 0
            found.append(f"{path.relative_to(root)} {number}")
    for path in sorted([*root.glob(ATTEMPTS), *root.glob(f"*/{ATTEMPTS}")]):
        begun = [event.step for event in read_attempts(path.parent) if isinstance(event, ReadyRecord)]
        checkpoint = max((step for where, step in saved.items() if where.is_relative_to(path.parent)), default=0)
        if begun and begun[-1] > checkpoint:
            found.append(f"{path.relative_to(root)} {begun[-1]}")
    summaries = [
        path for path in sorted(root.glob(f"**/{SUMMARY}")) if (last := read_summary(path.parent)) and last.finished
    ]
    return found + [str(path.relative_to(root)) for path in summaries]


def check_headway(root: Path, restarts: int) -> None:
    """Note how far the job is at this start.

    A user's own start (restarts 0) resets the count. A count that cannot be read or kept never ends a run: it is reset.

    Raises:
        HpcrlError: if the last FRUITLESS restarts were at the same place.
    """
    here = position(root)
    seen = [*(_earlier_starts(root / HEADWAY) if restarts else []), here][-FRUITLESS - 1 :]
    try:
        write_atomic(root / HEADWAY, msgspec.json.encode(seen))
    except HpcrlError as error:
        say(f"note: {error}; restarts without a new checkpoint are not counted from here")
    if len(seen) > FRUITLESS and all(place == here for place in seen):
        raise HpcrlError(
            f"{FRUITLESS} restarts without a new checkpoint: the run is not restarted automatically",
            f"see the logs of the last attempts; then continue with hpcrl resume {root}",
        )


def _earlier_starts(file: Path) -> list[list[str]]:
    """Where the previous starts were; [] where nothing can be read, as after a kill or with a full disk."""
    try:
        return read_json(file, list[list[str]])
    except FileNotFoundError:
        return []
    except (OSError, Damaged) as error:
        say(f"note: {file} cannot be read ({error}): restarts without a new checkpoint are counted from this one")
        return []
