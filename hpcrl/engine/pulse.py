"""Whether the engine core behind a server still works.

vLLM answers /health while its core hangs, or is stopped.  So a thread asks again and again what only the core can answer, between two
of its steps.  Invariant: every question has a deadline; an answer, whatever it says, is a sign of life.
"""

from __future__ import annotations

import threading
import time

from hpcrl.weights.engine_http import Address, HttpError, ask

QUESTION = "/is_paused"
EVERY = 2.0  #: seconds between two questions


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
