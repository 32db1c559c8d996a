"""The MPI ranks other than 0: each starts on its host what the launcher on rank 0 tells it to.

Invariants: a rank ends by itself when the launcher is silent; when it ends, by whatever, all that it started ends with
it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from hpcrl.errors import HpcrlError, PeerError
from hpcrl.launch.local import spawn
from hpcrl.launch.mpi import exit_status_relay
from hpcrl.launch.mpi.channel import (
    DEAD,
    Bye,
    Channel,
    FindPath,
    FromLauncher,
    PathFound,
    ProgramEnded,
    Quit,
    StartProgram,
)
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
        self._program: tuple[int, subprocess.Popen[bytes]] | None = None  #: the number of its order, the process

    def run(self) -> int:
        """Do what the launcher says until it says quit; the exit status."""
        try:
            while True:
                for _, message in self.channel.receive():
                    if isinstance(message, Quit):
                        self.channel.send(0, Bye())
                        return message.status
                    self._obey(message)
                self.channel.beat([0])
                self._tell_end()
                if 0 in self.channel.silent():
                    raise PeerError(f"the launcher on rank 0 was silent for {DEAD:.0f} s")
                time.sleep(0.1)
        except HpcrlError as error:
            print(f"hpcrl: error: {self.host}: {error}", file=sys.stderr, flush=True)
            self._end_program()
            self._tell_end()  # and so the launcher ends the run
            if 0 in self.channel.silent():
                exit_status_relay.tell(error.exit_code)  # its own word would not get through either
            return error.exit_code
        finally:
            self._end_program()
            end_descendants(0.5)

    def _obey(self, message: FromLauncher) -> None:
        match message:
            case FindPath():
                self.channel.send(0, PathFound(message.path, Path(message.path).exists()))
            case StartProgram():
                self._end_program()  # which may have stood still
                end_descendants(0.5)
                log = Path(message.log) if message.log else None
                self._program = message.number, spawn([sys.executable, "-m", *message.words], log)

    def _end_program(self) -> None:
        if self._program and self._program[1].poll() is None:
            end_processes([psutil.Process(self._program[1].pid)], GRACE)

    def _tell_end(self) -> None:
        """Tell, once, how the program has ended."""
        if self._program and (status := self._program[1].poll()) is not None:
            self.channel.send(0, ProgramEnded(self._program[0], status))
            self._program = None
