"""Whether what the engine's supervisor has started still works.

vLLM answers /health while its core hangs, or is stopped.  So a thread asks again and again what only the core can answer, between two
of its steps.  Before there is anybody to ask, all that tells a process which hangs from one that compiles is that it is stopped.
Invariant: every question has a deadline; an answer, whatever it says, is a sign of life.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import psutil

from hpcrl.run.process import descendants
from hpcrl.weights.engine_http import Address, HttpError, ask

QUESTION = "/is_paused"
EVERY = 2.0  #: seconds between two questions, or looks
ASLEEP = 30.0  #: seconds between two looks after which who looks was stopped itself; it may well wait 10 for an answer


class Pulse:
    """Asks from now on, until the process ends.  patience: seconds that one answer may take."""

    def __init__(self, address: Address, patience: float) -> None:
        self._address, self._patience, self._last = address, patience, time.monotonic()
        threading.Thread(target=self._listen, daemon=True).start()

    def silent(self, now: float) -> float:
        """Seconds since the last sign of life, by time.monotonic()."""
        return now - self._last

    def _listen(self) -> None:
        while True:
            try:
                ask(self._address, "GET", QUESTION, self._patience)
                self._last = time.monotonic()
            except HttpError as error:
                if error.status is not None:
                    self._last = time.monotonic()
            time.sleep(EVERY)


class Stopped:
    """How long a process below this one has been stopped, by a signal or a debugger; looks at most every EVERY seconds.

    among: the processes that count.  clock: seconds that never go back.
    """

    def __init__(
        self, among: Callable[[], Iterable[psutil.Process]] = descendants, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._among, self._clock, self._looked = among, clock, float("-inf")
        self._since: dict[int, float] = {}

    def longest(self) -> tuple[int, float] | None:
        """(process id, seconds) of the one that has been stopped for longest; None if nobody is, or it is not yet time to look."""
        now = self._clock()
        if now - self._looked < EVERY:
            return None
        if now - self._looked > ASLEEP:
            self._since = {}  # we were stopped ourselves, perhaps with all others
        self._looked = now
        found = [process.pid for process in self._among() if _is_stopped(process)]
        self._since = {pid: self._since.get(pid, now) for pid in found}
        return max(((pid, now - since) for pid, since in self._since.items()), key=lambda one: one[1], default=None)


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False  # it has ended
