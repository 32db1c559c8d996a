"""The MPI ranks other than 0: each does for its host, or slot, what the launcher on rank 0 says.

Invariants: a rank ends by itself when the launcher is silent; when it ends, by whatever, all that it started ends with
it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpcrl.errors import HpcrlError, PeerError
from hpcrl.launch.local import spawn
from hpcrl.launch.mpi import exit_status_relay
from hpcrl.launch.mpi.box_trial import TrialProcess
from hpcrl.launch.mpi.channel import (
    DEAD,
    BeginAttempt,
    BoxesTried,
    Bye,
    Channel,
    CheckPath,
    FromLauncher,
    HostEnded,
    PathFound,
    Quit,
    RunFiles,
    TryBoxes,
)
from hpcrl.launch.mpi.file_sync import FileSync, write_files
from hpcrl.launch.mpi.placement import Placement, RankPlace
from hpcrl.launch.roles import GRACE
from hpcrl.run.process import end_descendants, end_processes
from hpcrl.run.rundir import RunDir
from hpcrl.run.started_runs import LIVE


@dataclass
class HostPart:
    """What a rank has started for an attempt.

    Attributes:
        sync: the files that it carries, None where all see the run directory.
    """

    rundir: RunDir
    process: subprocess.Popen[bytes]
    sync: FileSync | None
    reported: bool = False  #: whether the launcher knows that it has ended


def start_part(rundir: RunDir, place: RankPlace, apart: bool) -> HostPart:
    """Start the process of this rank's host.

    Args:
        apart: whether some rank does not see the run directory, so that files are carried.
    """
    words = [str(rundir.root), "--attempt", str(rundir.attempt), "--host", place.host]
    log = rundir.logs / f"host-{place.host}.log"
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    process = spawn([sys.executable, "-m", "hpcrl.launch.host", *words], log)
    return HostPart(rundir, process, FileSync(rundir) if apart else None)


class HostRank:
    """One rank, from the launcher's first word to its last."""

    def __init__(self, channel: Channel[FromLauncher], placement: Placement) -> None:
        self.channel = channel
        self.place = placement.places[channel.rank]
        self.part: HostPart | None = None
        self.trial: TrialProcess | None = None

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
                if self.part:
                    self._report(self.part)
                if self.trial and (said := self.trial.outcome()):
                    self.trial = None
                    self.channel.send(0, BoxesTried(said))
                if 0 in self.channel.silent():
                    raise PeerError(f"the launcher on rank 0 was silent for {DEAD:.0f} s")
                time.sleep(0.1)
        except HpcrlError as error:
            print(f"hpcrl: error: {self.place.host}: {error}", file=sys.stderr, flush=True)
            self._end_part()
            if self.part:
                self._tell_end(self.part)  # and so the launcher ends the run
            if 0 in self.channel.silent():
                exit_status_relay.tell(error.exit_code)  # its own word would not get through either
            return error.exit_code
        finally:
            self._end_part()
            if self.trial:
                self.trial.end()
            end_descendants(0.5)

    def _end_part(self) -> None:
        if self.part and self.part.process.poll() is None:
            end_processes([psutil.Process(self.part.process.pid)], GRACE)

    def _obey(self, message: FromLauncher) -> None:
        match message:
            case BeginAttempt():
                self.part = self._start_attempt(message)
            case RunFiles() if self.part:
                if self.part.sync:
                    self.part.sync.put(message.files)
                else:
                    write_files(self.part.rundir, message.files)
            case TryBoxes():
                self.trial = TrialProcess(message.kinds)
            case CheckPath():
                self.channel.send(0, PathFound(Path(message.path).exists()))

    def _start_attempt(self, message: BeginAttempt) -> HostPart:
        self._end_part()  # of an attempt before, which may have stood still
        end_descendants(0.5)
        rundir = RunDir(message.root, message.attempt)
        if message.files:
            rundir.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            (rundir.here / "peers").mkdir(parents=True, exist_ok=True, mode=0o700)
            (rundir.root / "samples").mkdir(exist_ok=True, mode=0o700)
            if LIVE not in message.files:
                (rundir.root / LIVE).unlink(missing_ok=True)  # of an attempt before
            write_files(rundir, message.files)
        return start_part(rundir, self.place, bool(message.files))

    def _report(self, part: HostPart) -> None:
        """Send what is new in the run directory, and, once, how the part ended."""
        if part.sync and (files := part.sync.new()):
            self.channel.send(0, RunFiles(files))
        self._tell_end(part)

    def _tell_end(self, part: HostPart) -> None:
        if not part.reported and (status := part.process.poll()) is not None:
            part.reported = True
            self.channel.send(0, HostEnded(str(part.rundir.root), part.rundir.attempt, status))
