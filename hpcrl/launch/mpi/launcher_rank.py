"""MPI rank 0: the hosts of a run as the launcher sees them, each behind a rank that does what it is told.

Invariants: no wait is for ever: a host that is silent for a while ends the run; who sees the run directory is asked
before each attempt, and a host that does not gets the small files by which roles find each other.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, PeerError, UsageError
from hpcrl.launch import probe
from hpcrl.launch.attempts.host_processes import HostHandle, HostProcess
from hpcrl.launch.attempts.spare_hosts import mark_spares, without
from hpcrl.launch.local import Local
from hpcrl.launch.mpi.box_trial import TrialProcess
from hpcrl.launch.mpi.channel import (
    DEAD,
    BeginAttempt,
    BoxesTried,
    Bye,
    Channel,
    CheckPath,
    FromHost,
    HostEnded,
    PathFound,
    Quit,
    RunFiles,
    TryBoxes,
)
from hpcrl.launch.mpi.file_sync import read_code, read_files
from hpcrl.launch.mpi.host_rank import HostPart, start_part
from hpcrl.launch.mpi.placement import Placement, RankPlace
from hpcrl.launch.standalone_engine import elsewhere
from hpcrl.launch.stop_signals import StopRequest
from hpcrl.plan import Host, Plan
from hpcrl.run.pauses import follow_log
from hpcrl.run.role import launch_timeout
from hpcrl.run.rundir import RunDir
from hpcrl.sandbox.nodes.trial import BoxTrial
from hpcrl.utils.deadline import Deadline

PART = 20.0  #: seconds that the hosts may take to part at the end


@dataclass
class RemoteHost:
    """A member of the run behind another rank.

    Attributes:
        attempt_key: the run and the attempt with which it was started.
        ended: its exit status, once its rank has told it.
        expendable: as of `HostProcess`.
    """

    name: str
    log: Path
    rank: int
    channel: Channel[FromHost]
    attempt_key: tuple[str, int]
    ended: int | None = None
    memory: None = None
    expendable: str = ""

    @property
    def status(self) -> int | None:
        if self.ended is None and self.rank in self.channel.silent():
            return 1
        return self.ended

    def continues(self, folder: Path, hosts: Collection[str]) -> None:
        """Its own rank writes its log; here it is read as far as this host sees it."""
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
        apart: ranks that do not see the run directory.
        remote: members of the running attempt on other ranks.
        part: that on this one.
        left_out: hosts that are used no more, in the order in which that was found.
    """

    channel: Channel[FromHost]
    placement: Placement
    reports: dict[str, probe.HostReport]
    job_root: Path
    apart: set[int] = field(default_factory=set)
    remote: list[RemoteHost] = field(default_factory=list)
    part: HostPart | None = None
    left_out: list[str] = field(default_factory=list)
    python: str = sys.executable

    @property
    def others(self) -> list[int]:
        """Every rank but this one."""
        return [place.rank for place in self.placement.places[1:]]

    @property
    def _in_use(self) -> list[RankPlace]:
        """Those on hosts that are used."""
        return [place for place in self.placement.places[1:] if place.host not in self.left_out]

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
        self._ask_who_sees(rundir, launch_timeout())
        self._check_shared(plan)
        files = read_files(rundir, ["options.json", *_below(rundir, rundir.here), *_below(rundir, rundir.keys)])
        files |= read_code(rundir) if self.apart else {}
        self.remote = []
        for place in self._in_use:
            log = rundir.logs / f"host-{place.host}.log"
            name = f"host {place.host} (MPI rank {place.rank})"
            begun = str(rundir.root), rundir.attempt
            spare = place.host if place.host in plan.hosts and place.host not in plan.needed_hosts else ""
            self.remote.append(RemoteHost(name, log, place.rank, self.channel, begun, expendable=spare))
            needed = files if place.rank in self.apart else {}
            self.channel.send(place.rank, BeginAttempt(str(rundir.root), rundir.attempt, needed))
        here = self.placement.places[0]
        self.part = start_part(rundir, here, bool(self.apart))
        return [
            HostProcess(f"host {here.host}", rundir.logs / f"host-{here.host}.log", self.part.process),
            *self.remote,
        ]

    def try_boxes(self, kinds: Mapping[str, Sequence[str]], rundir: RunDir, seconds: float) -> dict[str, BoxTrial]:
        asked, found = {self.placement.first(host): host for host in kinds}, dict[str, BoxTrial]()
        here = TrialProcess(kinds[asked[0]]) if 0 in asked else None
        for rank in asked.keys() - {0}:
            self.channel.send(rank, TryBoxes(tuple(kinds[asked[rank]])))
        deadline = Deadline(seconds)
        while found.keys() < kinds.keys() and not deadline.over and not asked.keys() & set(self.channel.silent()):
            self.channel.beat(self.others)
            for rank, message in self.channel.receive():
                if isinstance(message, BoxesTried) and rank in asked:
                    found[asked[rank]] = message.trial
                self._handle(rank, message, rundir)
            if here and (said := here.outcome()):
                found[asked[0]] = said
                here = None
            time.sleep(0.02)
        if here:
            here.end()
        return found

    def all_see(self) -> bool:
        return not self.apart

    def again(self, root: Path) -> str:
        return f"hpcrl launch --resume {root} --hostfile FILE"

    def prepare(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        return Local().prepare(command, log)

    # ---- during the run

    def carry(self, stop: StopRequest, rundir: RunDir | None) -> None:
        """Take and pass on messages; called about five times a second.

        Raises:
            PeerError: names a rank that sends what is none.
        """
        if stop.nudges:  # mpirun hands on the SIGUSR1 by which hpcrl launch passes on a request to stop
            stop.nudges = 0
            stop.request_stop("asked to")
        self.channel.beat(self.others)
        for rank, message in self.channel.receive():
            self._handle(rank, message, rundir)
        if self.part and self.part.sync and (files := self.part.sync.new()):
            self._pass_on(files, origin=0)
        if rundir and rundir.here.exists():
            for rank in self.channel.silent():
                host = self.placement.places[rank].host
                rundir.fail("launcher", 0, f"host {host} did not answer for {DEAD:.0f} s; is it up, and its network?")

    def _handle(self, rank: int, message: FromHost, rundir: RunDir | None) -> None:
        match message:
            case RunFiles() if self.part and self.part.sync:
                self.part.sync.put(message.files)
                self._pass_on(message.files, origin=rank)
            case HostEnded():
                for member in self.remote:
                    if member.rank == rank and member.attempt_key == (message.root, message.attempt):
                        member.ended = message.status
            case PathFound(found=False):
                self.apart.add(rank)

    def _pass_on(self, files: dict[str, bytes], origin: int) -> None:
        for rank in self.apart - {origin}:
            self.channel.send(rank, RunFiles(files))

    def _ask_who_sees(self, rundir: RunDir, seconds: float) -> None:
        """Find out which ranks share the run directory: they find this attempt's plan there."""
        self.apart.clear()
        waiting = {place.rank for place in self._in_use}
        for rank in waiting:
            self.channel.send(rank, CheckPath(str(rundir.plan_file)))
        deadline = Deadline(seconds)
        while waiting:
            for rank, message in self.channel.receive():
                if isinstance(message, PathFound):
                    waiting.discard(rank)
                self._handle(rank, message, rundir)
            if deadline.over or set(self.channel.silent()) & waiting:
                names = ", ".join(sorted({self.placement.places[rank].host for rank in waiting}))
                raise HpcrlError(f"no answer from {names} within {seconds:.0f} s", "is the host up?")
            time.sleep(0.02)

    def _check_shared(self, plan: Plan) -> None:
        """Raise UsageError if trainer ranks would save to file systems that others of them do not see."""
        unshared = {self.placement.places[rank].host for rank in self.apart} & set(plan.trainer_hosts)
        if unshared:
            raise UsageError(
                f"host {sorted(unshared)[0]} has trainer ranks and does not see {self.job_root} with its checkpoints",
                "put --run-dir on a file system that rank 0 and all trainer hosts share; engines may do without",
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


def _below(rundir: RunDir, folder: Path) -> list[str]:
    return [str(path.relative_to(rundir.root)) for path in sorted(folder.rglob("*")) if path.is_file()]
