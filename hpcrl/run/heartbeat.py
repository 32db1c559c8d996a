"""Signs of life between processes that watch one another, such as a process that hangs cannot give.

    beating = HeartbeatWriter(folder, "trainer-3")  # in the process: a thread that writes a number every few seconds
    pulse = HeartbeatMonitor(folder)                # in the process that watches
    pulse.silent(60.0)                              # -> those that were not heard of for so long

A process that is stopped, or whose interpreter is suspended, writes no number.  One that computes for minutes without
letting Python continue, such as a compiler that holds the interpreter, writes none either, but uses its processor: it
counts as alive as long as it does.  Who is silent is found here; what follows is decided by launch/host.py and
launch/attempts/attempt.py.

Invariants: nothing depends on the clocks of two hosts; a process that has ended is not silent.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpcrl.run.rundir import listed
from hpcrl.utils.untrusted_files import read_regular, read_system
from hpcrl.utils.waiting import LastSign

FOLDER = "HPCRL_HEARTBEATS"  #: environment variable: where the processes of a host write; absent: no watcher
EVERY = 3.0  #: seconds between two numbers
LEAST = 15.0  #: seconds without a sign that say anything: a busy machine may miss one or two
LOOK = 5.0  #: seconds between two looks
BUSY = 0.02  #: share of a processor that a silent process uses if it is at work


class HeartbeatWriter:
    """Writes FOLDER/NAME: the process id and a number that grows.  A context: leaving it takes the file away."""

    def __init__(self, folder: str | Path, name: str, every: float = EVERY) -> None:
        self.path = Path(folder) / name
        self.every = every
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> HeartbeatWriter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(5)
        for path in (self._beside, self.path):
            with contextlib.suppress(OSError):
                path.unlink()

    @property
    def _beside(self) -> Path:
        return self.path.with_name(f".{self.path.name}")

    def _beat(self) -> None:
        number = 0
        while True:
            with contextlib.suppress(OSError):  # those who need the disk report that it is full
                self._beside.write_text(f"{os.getpid()} {number}")
                self._beside.replace(self.path)
            number += 1
            if self._ended.wait(self.every):
                return


def beating(name: str) -> contextlib.AbstractContextManager[object]:
    """A HeartbeatWriter where the environment names a watcher, else nothing."""
    folder = os.environ.get(FOLDER)
    return HeartbeatWriter(folder, name) if folder else contextlib.nullcontext()


@dataclass
class Silent:
    """A process that has not been heard of.

    Attributes:
        state: the system's word for it, such as `stopped`, if it is on this host.
    """

    name: str
    pid: int
    seconds: float
    state: str = ""

    def __str__(self) -> str:
        state = f", which is {self.state}" if self.state else ""
        return f"gives no sign of life for {self.seconds:.0f} s (process {self.pid}{state})"


@dataclass
class _Heard:
    text: str
    sign: LastSign
    used: float = 0.0


class HeartbeatMonitor:
    """What was heard of the processes that write into a folder.

    Attributes:
        here: whether they are on this host, so that what they do can be looked up.
        look: seconds between two looks.
        clock: seconds that never go back.
    """

    def __init__(
        self, folder: Path, here: bool = True, look: float = LOOK, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder = folder
        self.here = here
        self.look = look
        self.clock = clock
        self._heard: dict[str, _Heard] = {}
        self._looked = LastSign(math.inf, clock)

    def silent(self, seconds: float) -> list[Silent]:
        """Those that gave no sign for longer than `seconds`; looks at most every `look` seconds, else says none."""
        passed = self._looked.silence
        if not self._looked.due(self.look):
            return []
        if passed > 4 * self.look:  # we were asleep ourselves: everybody gets the time again
            for heard in self._heard.values():
                heard.sign.heard()
        found = []
        names = sorted(name for name in listed(self.folder) if not name.startswith("."))
        self._heard = {name: heard for name, heard in self._heard.items() if name in names}
        for name in names:
            if (late := self._read_beat(name, passed)) and late.seconds > seconds:
                found.append(late)
        return found

    def _read_beat(self, name: str, passed: float) -> Silent | None:
        try:
            text = read_regular(self.folder / name, 100).decode()
            pid = int(text.split()[0])
        except (OSError, ValueError, IndexError):
            return None  # being replaced, or gone
        heard = self._heard.setdefault(name, _Heard("", LastSign(clock=self.clock)))
        if text != heard.text:
            heard.text = text
            heard.sign.heard()
            return None
        state, used = _at_work(pid) if self.here else ("", 0.0)
        busy = used - heard.used > BUSY * passed
        heard.used = used
        if state in ("gone", "dead") or (busy and state != "stopped"):
            heard.sign.heard()
            return None
        return Silent(name, pid, heard.sign.silence, state)


#: what /proc/PID/stat says of a process (proc(5)) -> for a user
STATES = {"T": "stopped", "t": "traced", "D": "waiting for a disk or a network file system", "Z": "dead", "X": "dead"}


def _at_work(pid: int) -> tuple[str, float]:
    """(the system's word for what a process does, "" if it is nothing special; seconds of processor that it has
    used)."""
    try:
        words = read_system(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return "gone", 0.0
    return STATES.get(words[0], ""), (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
