"""The launcher on MPI rank 0.  It has one rank on every other host, and orders each which program to start there.

Invariants: no wait is for ever: a host that is silent for a while ends the run; every host sees the run directory, or
the run does not begin.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.launch import probe
from hpcrl.launch.attempts.host_processes import HostProcess
from hpcrl.launch.attempts.spare_hosts import mark_spares, without
from hpcrl.launch.local import Local, spawn
from hpcrl.launch.mpi.channel import DEAD, Channel, Order, OrderState
from hpcrl.launch.mpi.placement import Placement
from hpcrl.launch.standalone_engine import elsewhere
from hpcrl.launch.stop_signals import StopRequest
from hpcrl.plan import Host, Plan
from hpcrl.run.role import launch_timeout
from hpcrl.run.rundir import RunDir
from hpcrl.utils.waiting import Deadline


@dataclass
class RankProgram(HostProcess):
    """A program that another rank was ordered to start, and whose log that rank writes.

    Attributes:
        ended: its exit status, 1 if its rank has fallen silent; None while it runs.
    """

    process: None = None  # type: ignore[assignment]
    order: Order = field(default_factory=Order)
    ended: int | None = None

    @property
    def status(self) -> int | None:
        return self.ended

    def end(self) -> None:
        """Its own rank ends it: it was told so, or is gone."""


@dataclass
class MpiHosts:
    """The launcher's backend under mpirun.

    Attributes:
        reports: of each host.
        unchecked: a file that every host is to see before the run begins; None once all do.
        left_out: hosts that are used no more, in the order in which that was found.
    """

    channel: Channel[OrderState]
    placement: Placement
    reports: dict[str, probe.HostReport]
    unchecked: Path | None = None
    left_out: list[str] = field(default_factory=list)
    python: str = sys.executable

    def __post_init__(self) -> None:
        self._last = {rank: RankProgram("", Path()) for rank in self.channel.peers}  #: what each rank was last ordered

    # ---- what the launcher asks of a backend

    def hosts(self, options: Options, rundir: RunDir) -> list[Host]:
        hosts = without(mark_spares(self.placement.hosts, options.spares), self.left_out)
        network = probe.choose(self.reports, options.interface, apart=elsewhere(options) is not None)
        return [
            replace(host, address=network[host.name].address, interface=network[host.name].interface) for host in hosts
        ]

    def leave_out(self, hosts: Sequence[str]) -> None:
        self.left_out += hosts

    def start(self, options: Options, plan: Plan, rundir: RunDir) -> list[HostProcess]:
        alone, members = set(plan.hosts) - set(plan.needed_hosts), list[HostProcess]()
        for rank, host in enumerate(self.placement.names):
            if host not in self.left_out:
                words = [str(rundir.root), "--attempt", str(rundir.attempt), "--host", host]
                member = self._start(rank, ["hpcrl.launch.host", *words], rundir.logs / f"host-{host}.log")
                member.expendable = host if rank and host in alone else ""
                members.append(member)
        return members

    def _start(self, rank: int, words: Sequence[str], log: Path) -> HostProcess:
        name = f"host {self.placement.names[rank]}"
        if not rank:
            return HostProcess(name, log, spawn([sys.executable, "-m", *words], log))
        return self._order(rank, words, f"{name} (MPI rank {rank})", log)

    def _order(self, rank: int, words: Sequence[str], name: str = "", log: Path | None = None) -> RankProgram:
        order = Order(self._last[rank].order.number + 1, tuple(words), str(log or ""))
        self._last[rank] = RankProgram(name, log or Path(), order=order)
        return self._last[rank]

    def again(self, root: Path) -> str:
        return f"hpcrl launch --resume {root} --hostfile FILE"

    def prepare(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        return Local().prepare(command, log)

    # ---- during the run

    def carry(self, stop: StopRequest, rundir: RunDir | None) -> None:
        """Talk to the ranks; called about five times a second.

        Raises:
            PeerError: names a rank that sends what is no message.
            HpcrlError: of the first call, as of `check_shared`.
        """
        if self.unchecked:
            self.check_shared(self.unchecked)
            self.unchecked = None
        if stop.nudges:  # mpirun hands on the SIGUSR1 by which hpcrl launch passes on a request to stop
            stop.nudges = 0
            stop.request_stop("asked to")
        for host in self._exchange():
            if rundir and rundir.here.exists():
                rundir.fail("launcher", 0, f"host {host} did not answer for {DEAD:.0f} s; is it up, and its network?")

    def _exchange(self) -> list[str]:
        """Say the orders, and take how they go; the hosts that are silent."""
        for rank, state in self.channel.receive():
            if state.number == self._last[rank].order.number:
                self._last[rank].ended = state.status
        silent = self.channel.silent()
        for rank, program in self._last.items():
            if rank not in silent:
                self.channel.say(rank, program.order)
            elif program.ended is None:
                program.ended = 1
        return [self.placement.names[rank] for rank in silent]

    def check_shared(self, file: Path) -> None:
        """Have every host look for a file of the run directory.

        Raises:
            UsageError: names the hosts that do not see it.
            HpcrlError: names the hosts that do not answer.
        """
        look, deadline = ["hpcrl.run.process", "test", "-e", str(file)], Deadline(launch_timeout())
        asked = {self.placement.names[rank]: self._order(rank, look) for rank in self.channel.peers}
        missing = list(asked)
        while missing and not deadline.over:
            if missing := self._exchange():
                break
            missing = [host for host, program in asked.items() if program.status is None]
            time.sleep(0.02)
        if missing:
            seconds = deadline.seconds - deadline.left
            raise HpcrlError(f"no answer from {', '.join(missing)} within {seconds:.0f} s", f"does it see {file}?")
        if unseen := [host for host, program in asked.items() if program.status]:
            raise UsageError(
                f"host {', '.join(unseen)} does not see the run directory: no {file}",
                "put --run-dir on a file system that all hosts share",
            )
