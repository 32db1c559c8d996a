"""The launcher on MPI rank 0.  It has one rank on every other host, and tells each which program to start there.

Invariants: no wait is for ever: a host that is silent for a while ends the run; every host sees the run directory, or
the run does not begin.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, PeerError, UsageError
from hpcrl.launch import probe
from hpcrl.launch.attempts.box_trials import wait_for_trials
from hpcrl.launch.attempts.host_processes import HostHandle, HostProcess
from hpcrl.launch.attempts.spare_hosts import mark_spares, without
from hpcrl.launch.local import Local, spawn
from hpcrl.launch.mpi.channel import (
    DEAD,
    Bye,
    Channel,
    FindPath,
    FromHost,
    PathFound,
    ProgramEnded,
    Quit,
    StartProgram,
)
from hpcrl.launch.mpi.placement import Placement
from hpcrl.launch.standalone_engine import elsewhere
from hpcrl.launch.stop_signals import StopRequest
from hpcrl.plan import Host, Plan
from hpcrl.run.exit_status import MemoryWatch
from hpcrl.run.pauses import follow_log
from hpcrl.run.role import launch_timeout
from hpcrl.run.rundir import RunDir
from hpcrl.sandbox.nodes.trial import BoxTrial
from hpcrl.utils.waiting import Deadline

PART = 20.0  #: seconds that the hosts may take to part at the end


@dataclass
class RemoteProgram:
    """A program that another rank has started.

    Attributes:
        number: of the order to start it.
        ended: its exit status, once its rank has told it.
        expendable: as of `HostProcess`.
    """

    name: str
    log: Path
    number: int
    rank: int
    silent: Callable[[], list[int]]
    ended: int | None = None
    memory: MemoryWatch | None = None
    expendable: str = ""

    @property
    def status(self) -> int | None:
        return 1 if self.ended is None and self.rank in self.silent() else self.ended

    def continues(self, folder: Path, hosts: Collection[str]) -> None:
        """Its own rank writes its log."""
        self.log = follow_log(self.log, folder)

    def lost(self) -> str:
        """It stands for one host alone, and ends with it."""
        return ""

    def lives_without(self) -> frozenset[str]:
        return frozenset()

    def end(self) -> None:
        """Its own rank ends it: it was told so, or is gone."""


@dataclass
class MpiHosts:
    """The launcher's backend under mpirun.

    Attributes:
        reports: of each host.
        unchecked: a file that every host is to see before the run begins; None once all do.
        remote: what other ranks have started last.
        left_out: hosts that are used no more, in the order in which that was found.
    """

    channel: Channel[FromHost]
    placement: Placement
    reports: dict[str, probe.HostReport]
    unchecked: Path | None = None
    remote: dict[int, RemoteProgram] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    python: str = sys.executable
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def others(self) -> list[int]:
        """Every rank but this one."""
        return [place.rank for place in self.placement.places[1:]]

    # ---- what the launcher asks of a backend

    def hosts(self, options: Options, rundir: RunDir) -> list[Host]:
        network = probe.choose(self.reports, options.interface, apart=elsewhere(options) is not None)
        hosts = without(mark_spares(self.placement.hosts, options.spares), self.left_out)
        return [
            msgspec.structs.replace(host, address=network[host.name].address, interface=network[host.name].interface)
            for host in hosts
        ]

    def leave_out(self, hosts: Sequence[str]) -> None:
        self.left_out += hosts

    def start(self, options: Options, plan: Plan, rundir: RunDir) -> list[HostHandle]:
        needed, members = plan.needed_hosts, list[HostHandle]()
        for place in self.placement.places:
            if place.host not in self.left_out:
                log = rundir.logs / f"host-{place.host}.log"
                words = [str(rundir.root), "--attempt", str(rundir.attempt), "--host", place.host]
                member = self._start(place.rank, place.host, ["hpcrl.launch.host", *words], log)
                if place.rank and place.host in plan.hosts and place.host not in needed:
                    member.expendable = place.host
                members.append(member)
        return members

    def _start(self, rank: int, host: str, words: Sequence[str], log: Path) -> HostProcess | RemoteProgram:
        if not rank:
            return HostProcess(f"host {host}", log, spawn([sys.executable, "-m", *words], log))
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        number, name = next(self._numbers), f"host {host} (MPI rank {rank})"
        self.remote[rank] = RemoteProgram(name, log, number, rank, self.channel.silent)
        self.channel.send(rank, StartProgram(number, tuple(words), str(log)))
        return self.remote[rank]

    def try_boxes(self, kinds: Mapping[str, Sequence[str]], rundir: RunDir, seconds: float) -> dict[str, BoxTrial]:
        (folder := rundir.here / "boxes").mkdir(exist_ok=True)
        tries = [
            self._start(
                self.placement.first(host),
                host,
                ["hpcrl.sandbox.nodes.trial", str(folder / f"{host}.json"), *words],
                rundir.logs / "boxes.log",
            )
            for host, words in kinds.items()
        ]

        def running() -> bool:
            self.carry(None, None)
            return any(one.status is None for one in tries)

        try:
            return wait_for_trials(folder, kinds, seconds, running)
        finally:
            for one in tries:
                one.end()

    def again(self, root: Path) -> str:
        return f"hpcrl launch --resume {root} --hostfile FILE"

    def prepare(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        return Local().prepare(command, log)

    # ---- during the run

    def carry(self, stop: StopRequest | None, rundir: RunDir | None) -> None:
        """Take what the ranks say; called about five times a second.

        Raises:
            PeerError: names a rank that sends what is none.
            HpcrlError: of the first call, as of `check_shared`.
        """
        if self.unchecked:
            self.check_shared(self.unchecked)
            self.unchecked = None
        if stop and stop.nudges:  # mpirun hands on the SIGUSR1 by which hpcrl launch passes on a request to stop
            stop.nudges = 0
            stop.request_stop("asked to")
        self.channel.beat(self.others)
        for rank, message in self.channel.receive():
            self._note(rank, message)
        if rundir and rundir.here.exists():
            for rank in self.channel.silent():
                host = self.placement.places[rank].host
                rundir.fail("launcher", 0, f"host {host} did not answer for {DEAD:.0f} s; is it up, and its network?")

    def _note(self, rank: int, message: FromHost) -> None:
        program = self.remote.get(rank)
        if isinstance(message, ProgramEnded) and program and program.number == message.number:
            program.ended = message.status

    def check_shared(self, file: Path) -> None:
        """Ask every host whether it sees a file of the run directory.

        Raises:
            UsageError: names the hosts that do not.
            HpcrlError: names the hosts that do not answer.
        """
        asked = {place.rank: place.host for place in self.placement.places[1:] if place.host not in self.left_out}
        deadline, waiting, unseen = Deadline(launch_timeout()), set(asked), set[int]()
        for rank in asked:
            self.channel.send(rank, FindPath(str(file)))
        while waiting:
            for rank, message in self.channel.receive():
                if isinstance(message, PathFound) and message.path == str(file):
                    waiting.discard(rank)
                    unseen |= set() if message.found else {rank}
                self._note(rank, message)
            if deadline.over or set(self.channel.silent()) & waiting:
                names = ", ".join(asked[rank] for rank in sorted(waiting))
                raise HpcrlError(f"no answer from {names} within {deadline.seconds:.0f} s", "is the host up?")
            self.channel.beat(self.others)
            time.sleep(0.02)
        if unseen:
            names = ", ".join(asked[rank] for rank in sorted(unseen))
            raise UsageError(
                f"host {names} does not see the run directory: no {file}",
                "put --run-dir on a file system that all hosts share",
            )

    def dismiss(self, status: int) -> bool:
        """Tell every rank to quit; whether all have answered in time."""
        waiting = set(self.others)
        for rank in waiting:
            self.channel.send(rank, Quit(status))
        deadline = Deadline(PART)
        try:
            while waiting - set(self.channel.silent()) and not deadline.over:
                waiting -= {rank for rank, message in self.channel.receive() if isinstance(message, Bye)}
                time.sleep(0.02)
        except PeerError:
            return False  # the run has ended, and the world is aborted
        return not waiting
