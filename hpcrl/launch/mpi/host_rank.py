"""The MPI ranks other than 0: each starts on its host what the launcher on rank 0 orders.

Invariants: a rank ends by itself when the launcher is silent; when it ends, by whatever, all that it started ends with
it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from hpcrl.errors import HpcrlError, PeerError
from hpcrl.launch.local import spawn
from hpcrl.launch.mpi import exit_status_relay
from hpcrl.launch.mpi.channel import DEAD, Channel, FromLauncher, OrderState, Quit
from hpcrl.launch.roles import GRACE
from hpcrl.run.process import end_descendants, end_processes


class HostRank:
    """One rank, from the launcher's first word to its last.

    Args:
        host: its name in the plan.
    """

    def __init__(self, channel: Channel[FromLauncher], host: str) -> None:
        self.channel = channel
        self.host = host
        self._number = 0  #: of the last order
        self._process: subprocess.Popen[bytes] | None = None  #: that it has started

    @property
    def report(self) -> OrderState:
        """How the last order goes."""
        return OrderState(self._number, self._process.poll() if self._process else None)

    def run(self) -> int:
        """Do what the launcher orders until it says quit; the exit status."""
        try:
            while True:
                for _, message in self.channel.receive():
                    if isinstance(message, Quit):
                        return message.status
                    if message.number != self._number:
                        self._end()  # the process of the order before may have stood still
                        words, log = [sys.executable, "-m", *message.words], Path(message.log) if message.log else None
                        self._number, self._process = message.number, spawn(words, log)
                self.channel.say(0, self.report)
                if self.channel.silent():
                    raise PeerError(f"the launcher on rank 0 was silent for {DEAD:.0f} s")
                time.sleep(0.1)
        except HpcrlError as error:
            print(f"hpcrl: error: {self.host}: {error}", file=sys.stderr, flush=True)
            if self.channel.silent():
                exit_status_relay.tell(error.exit_code)  # rank 0's own word would not get through
            return error.exit_code
        finally:
            self._end()

    def _end(self) -> None:
        """End the process, and what it has left."""
        if self._process and self._process.poll() is None:
            end_processes([psutil.Process(self._process.pid)], GRACE)
            self._process.returncode = -signal.SIGTERM  # which psutil has read in place of Popen
        end_descendants(0.5)
