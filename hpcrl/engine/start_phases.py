"""What an engine's server and workers do before they are ready, told to their supervisor, whose timeline has it.

They are processes of vLLM's making.  Each adds lines to one file of the supervisor's own directory on this host, which
it reads once the engine is up.  Invariants: an engine never ends for want of that file, and nothing but times is in it;
of several workers the first alone tells.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.report.timeline.spans import CONFIGURE, IMPORT, LOAD, PROFILE, UNPACK, WARM_UP, Timeline, process_began
from hpcrl.untrusted_files import Damaged, open_append, read_regular

#: the variable that names the file
FILE = "HPCRL_START_PHASES"
#: methods of vLLM's workers that are phases of their start
METHODS = {"load_model": LOAD, "determine_available_memory": PROFILE, "compile_or_warm_up_model": WARM_UP}
MOST = 1 << 16  #: bytes of the file that are read


class Phase(msgspec.Struct, array_like=True):
    """A name of `hpcrl.report.timeline.spans`, begin and end in microseconds of unix time."""

    name: str
    begin: int
    end: int


def now() -> int:
    """Microseconds of unix time."""
    return time.time_ns() // 1000


def tell(name: str, begin: int, end: int, file: Path | None = None) -> None:
    """Add a phase to the file, if there is one.

    Args:
        file: the supervisor's own; None: what FILE names.
    """
    if path := file or os.environ.get(FILE):
        with contextlib.suppress(OSError), open_append(Path(path)) as out:
            out.write(msgspec.json.encode(Phase(name, begin, end)) + b"\n")


def imported() -> None:
    """The server has imported what it needs."""
    tell(IMPORT, process_began(), now())


def watch(worker: Any) -> None:
    """Have a worker that is being made tell of its start."""
    for name, phase in METHODS.items():
        if hasattr(worker, name):
            setattr(worker, name, _timed(worker, getattr(worker, name), phase))


def _timed(worker: Any, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
    def timed(*given: Any, **named: Any) -> Any:
        begin = now()
        try:
            return method(*given, **named)
        finally:
            if not getattr(worker, "rank", 0):
                tell(phase, begin, now())

    return timed


def record(path: Path, timeline: Timeline) -> None:
    """Put what was told into the supervisor's timeline, with the time between the imports and the first of a worker."""
    found = list(_read(path))
    ends = [phase.end for phase in found if phase.name == IMPORT]
    begins = [phase.begin for phase in found if phase.name == LOAD]
    if ends and begins and begins[0] > ends[0]:
        found.append(Phase(CONFIGURE, ends[0], begins[0]))
    for phase in sorted(found, key=lambda phase: phase.end):
        timeline.add(phase.name, phase.begin, phase.end)


def _read(path: Path) -> Iterator[Phase]:
    try:
        lines = read_regular(path, MOST).splitlines()
    except (OSError, Damaged):
        return
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            phase = msgspec.json.decode(line, type=Phase)
            if phase.name in (UNPACK, IMPORT, *METHODS.values()) and phase.begin <= phase.end:
                yield phase
