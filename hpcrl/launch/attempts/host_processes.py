"""The processes by which the launcher holds the hosts of a run, through one attempt after another.

Invariants: an attempt takes over the hosts of the one before it only when each of them, except those that it leaves
out, has said that nothing is left there but engines that are well; whatever happens, no process of an attempt outlives
`end`.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import psutil

from hpcrl.errors import HpcrlError
from hpcrl.launch.roles import GRACE
from hpcrl.plan import Host, Plan
from hpcrl.run.exit_status import MemoryWatch
from hpcrl.run.pauses import CarriedOver, PausedHost, carried_over, follow_log, hand_over, paused_hosts
from hpcrl.run.process import end_descendants, end_processes
from hpcrl.run.role import read_plan
from hpcrl.run.rundir import BEATS, RunDir, listed
from hpcrl.transport.auth import forget_keys
from hpcrl.utils.waiting import Deadline

PARTING = GRACE + 5.0  #: seconds that hosts may take to end by themselves after the attempt has failed
PAUSING = GRACE + 20.0  #: seconds until they have noticed that, and ended what is to end
AT_ONCE = 0.5  #: seconds between SIGTERM and SIGKILL after a second signal
LOOK = 0.2  #: seconds between two looks for hosts that are paused


@dataclass
class HostProcess:
    """A process of the launcher that stands for some hosts: a host's own, or a scheduler's step.

    Attributes:
        memory: what the kernel had killed before, where the process and what it stands for are on this host.
        expendable: the host that it stands for, if that has sandboxes and nothing else: an attempt does without it.
    """

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    memory: MemoryWatch | None = None
    expendable: str = ""

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it lives."""
        return self.process.poll()

    def lost(self) -> str:
        """How a host behind it is known to have died, whether it lives on itself or not; empty if none has."""
        return ""

    def lives_without(self) -> frozenset[str]:
        """The hosts that it has lost and stands for the others all the same."""
        return frozenset()

    def continues(self, folder: Path, hosts: Collection[str]) -> None:
        """Stand for what another attempt uses of its hosts, with its log in the directory of that attempt's, too."""
        self.log = follow_log(self.log, folder)

    def end(self) -> None:
        """End it, if it has not ended by itself."""
        if self.status is None:
            end_processes([psutil.Process(self.process.pid)], GRACE)


class FailedHosts(NamedTuple):
    """An attempt that has failed, and what its hosts have said since."""

    rundir: RunDir
    plan: Plan
    records: Mapping[str, PausedHost]


@dataclass
class HeldHosts:
    """The hosts that a stage has now.

    Attributes:
        hosts: in the order of the plan, spare ones among them.
        members: what stands for them; none before an attempt has begun, or once all have ended.
        carried: what the next attempt takes over; None where it starts every process.
        absent: after `pause`, the hosts that have not said that the failed attempt has ended there.
        stuck: host -> what of it cannot be killed there.
        kept: how many of the hosts are for sandboxes in some stage of the job (`hpcrl.plan.hosts_kept`).
    """

    hosts: list[Host] = field(default_factory=list)
    members: list[HostProcess] = field(default_factory=list)
    carried: CarriedOver | None = None
    lent: IO[bytes] | None = None  #: held open as long as the run has engines that it did not start
    absent: set[str] = field(default_factory=set)
    stuck: dict[str, str] = field(default_factory=dict)
    kept: int = 0
    _paused: RunDir | None = None
    _failed: FailedHosts | None = None

    @property
    def engines(self) -> Mapping[int, int]:
        """The engines that continue, and their incarnations."""
        return self.carried.engines if self.carried else {}

    def pause(self, rundir: RunDir, poll: Callable[[], None]) -> bool:
        """Wait until the failed attempt has ended on every host, except its engines: until no host is `absent` except
        lost ones, or for PAUSING seconds, or until a host's own process has ended.  Hosts that are
        expendable are not waited for: they follow when they can.

        Returns:
            Whether none is absent; else they are left out, or `end` is next.
        """
        self.absent, self.stuck, self._failed = {host.name for host in self.hosts}, {}, None
        try:
            records, plan = paused_hosts(rundir), read_plan(rundir)
        except HpcrlError:  # it failed before it had one
            return False
        deadline = Deadline(PAUSING)
        expendable = {m.expendable for m in self.members}
        needed = [m for m in self.members if not m.expendable]
        while needed and not records.damaged and not deadline.over:
            poll()
            if any(m.status is not None or (m.lost() and not m.lives_without()) for m in needed):
                self.absent = {host.name for host in self.hosts}
                return False
            names = [name for name in listed(rundir.here / BEATS) if not name.startswith(".")]
            records.poll()
            self.absent = {
                host.name for host in self.hosts if not _all_of(host.name, names, records.found)
            } - expendable
            if all(any(host in m.lives_without() for m in self.members) for host in self.absent):
                break
            time.sleep(LOOK)
        self._failed = FailedHosts(rundir, plan, records.found)
        self.stuck = {
            host.name: record.stuck
            for host in self.hosts
            for name, record in records.found.items()
            if record.stuck and is_of(name, host.name)
        }
        return not self.absent

    def carry(self, plan: Plan, engines: bool = True) -> None:
        """Take over what the hosts of the next attempt have; all of them are paused.

        Args:
            plan: the next attempt's.
            engines: whether they continue.
        """
        assert self._failed is not None, "pause() comes first"
        used = [host.name for host in self.hosts]
        records = [record for name, record in self._failed.records.items() if any(is_of(name, host) for host in used)]
        self.carried = carried_over(self._failed.plan, plan, records if engines else [])
        self._paused = self._failed.rundir

    def begin_again(self, rundir: RunDir, plan: Plan) -> None:
        """Have the paused hosts begin this attempt, whose plan and keys are there.

        Raises:
            HpcrlError: if that cannot be written.
        """
        assert self._paused is not None and self.carried is not None, "pause() comes first"
        for member in self.members:
            member.continues(rundir.logs, plan.hosts)
        hand_over(self._paused, rundir, self.carried)
        self._paused = self.carried = None

    def end(self, rundir: RunDir, poll: Callable[[], None], at_once: Callable[[], bool] = lambda: False) -> None:
        """End all of it everywhere: hosts read it in the run directory, what is left after that is ended
        here.

        Args:
            at_once: whether a user who waits does not want to wait for that; asked again and again. Only where all of
                it is below this process: a scheduler's step that is killed here may stay there.
        """
        if any(m.status is None for m in self.members):
            with contextlib.suppress(OSError):  # a file system that takes nothing must not hide why it has ended
                (self._paused or rundir).request_end()
        deadline = Deadline(PARTING)
        here = all(m.memory is not None for m in self.members)
        while any(m.status is None for m in self.members) and not deadline.over:
            if here and at_once():
                end_descendants(AT_ONCE)
                break
            poll()
            time.sleep(0.05)
        for member in self.members:
            member.end()
        end_descendants(0.5)
        forget_keys(rundir)
        if self.lent is not None:
            self.lent.close()
            self.lent = None
        self.members, self.carried, self._paused = [], None, None


def is_of(name: str, host: str) -> bool:
    """Whether this is the name of a host's process, or of the process of one of its slots."""
    return name == host or (name.startswith(f"{host}-") and name[len(host) + 1 :].isdigit())


def _all_of(host: str, alive: Iterable[str], told: Collection[str]) -> bool:
    """Whether each process of a host has told that it is paused: there is one at least.

    Args:
        alive: the names under which processes of hosts give signs of life.
    """
    ours = {name for name in (*alive, *told) if is_of(name, host)}
    return bool(ours) and ours <= set(told)
