"""Whether a run gets on: how long its steps take, whether restarts have brought it anywhere, and which hosts broke
under it.

Invariants: the time kept for saving before a limit is never less than the floor; a run that has failed in FRUITLESS
attempts one after another without a new checkpoint is not started again by itself; a host is called broken only for
words by which a driver or CUDA says that the hardware is.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path

import msgspec

from hpcrl.careful_files import Damaged, read_json, read_regular
from hpcrl.errors import HpcrlError
from hpcrl.launch.job import say
from hpcrl.plan import Plan
from hpcrl.report.file_tail import last_lines
from hpcrl.report.metrics import last_records
from hpcrl.run.exit_status import hardware_words
from hpcrl.run.rundir import RunDir, write_atomic
from hpcrl.run.summary import SUMMARY, read_summary

HEADWAY = "headway.json"  #: in a run directory: where the last starts stood
FRUITLESS = 5  # preemptions in a row are no failure of the run, but as many as this bring it nowhere
RECENT = 20  #: records that an estimate looks back on
SLACK = 15.0  #: seconds for everything but the step and the save


def margin(rundir: RunDir, floor: float) -> float:
    """Seconds before the time limit at which to stop: two steps, the slowest save, and slack; at least `floor`."""
    rows = last_records(rundir.metrics_file, RECENT)
    step = [row["perf/step_time"] for row in rows if "perf/step_time" in row]
    save = [row["perf/save_time"] for row in rows if "perf/save_time" in row]
    measured = 2 * statistics.median(step) + max(save, default=0.0) + SLACK if step else 0.0
    return max(floor, measured)


def position(root: Path) -> list[str]:
    """What a job has saved so far: the tracker of every stage, and which stages are finished."""
    found = []
    for path in sorted(root.glob("**/latest_checkpointed_iteration.txt")):
        with contextlib.suppress(OSError):
            found.append(f"{path.relative_to(root)} {read_regular(path).decode(errors='replace').strip()}")
    summaries = [
        path for path in sorted(root.glob(f"**/{SUMMARY}")) if (last := read_summary(path.parent)) and last.finished
    ]
    return found + [str(path.relative_to(root)) for path in summaries]


def check_headway(root: Path, restarts: int) -> None:
    """Note where the job stands at this start; HpcrlError if the last FRUITLESS restarts stood at the same place.

    A start by hand (restarts 0) begins the count anew.  A count that cannot be read or kept never ends a run: it begins
    anew.
    """
    here = position(root)
    seen = [*(_earlier_starts(root / HEADWAY) if restarts else []), here][-FRUITLESS - 1 :]
    try:
        write_atomic(root / HEADWAY, msgspec.json.encode(seen))
    except HpcrlError as error:
        say(f"note: {error}; restarts without a new checkpoint are not counted from here")
    if len(seen) > FRUITLESS and all(place == here for place in seen):
        raise HpcrlError(
            f"{FRUITLESS} restarts without a new checkpoint: not started again by itself",
            f"see the logs of the last attempts; then go on with hpcrl resume {root}",
        )


def _earlier_starts(file: Path) -> list[list[str]]:
    """Where the starts before this one stood; [] where nothing can be read, as after a kill or with a full disk."""
    try:
        return read_json(file, list[list[str]])
    except FileNotFoundError:
        return []
    except (OSError, Damaged) as error:
        say(f"note: {file} cannot be read ({error}): restarts without a new checkpoint are counted from this one")
        return []


# ---- hosts that broke

BROKEN = "broken-hosts.json"  #: in a run directory: host -> what was seen there
LOOKED_AT = 200  #: lines at the end of a log


def find_broken_host(rundir: RunDir, plan: Plan) -> tuple[str, str] | None:
    """(host, what was seen) of the role that failed first in an attempt, if its error or the end of its log tell of
    hardware."""
    failure = rundir.failure()
    places = {"trainer": plan.trainers, "engine": plan.engines}.get(failure.role if failure else "", ())
    if failure is None or failure.index >= len(places):
        return None
    log = rundir.logs / f"{failure.role}-{failure.index}.log"
    tail = b"\n".join(last_lines(log, LOOKED_AT)).decode(errors="replace") if log.exists() else ""
    said = hardware_words(f"{failure.message}\n{tail}")
    return (places[failure.index].host, said) if said else None


def note_broken_host(root: Path, host: str, said: str) -> None:
    """Remember it, for this run's later starts."""
    when = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
    write_atomic(root / BROKEN, msgspec.json.format(msgspec.json.encode({**_broken(root), host: f"{when} {said}"})))


def broken_hosts(root: Path) -> list[str]:
    """The hosts that the run has found broken."""
    return list(_broken(root))


def _broken(root: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, Damaged):
        return read_json(root / BROKEN, dict[str, str])
    return {}
