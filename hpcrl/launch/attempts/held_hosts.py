"""The processes by which the launcher holds the hosts of a run, through one attempt after another.

Invariants: an attempt takes over the hosts of the one before it only when each of them has said that nothing is left
there but engines that are well; whatever happens, no process of an attempt outlives `end`.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import psutil

from hpcrl.errors import HpcrlError
from hpcrl.launch.roles import GRACE
from hpcrl.plan import Host
from hpcrl.queue.auth import forget_keys
from hpcrl.run.exit_status import MemoryWatch
from hpcrl.run.pauses import CarriedOver, carried_over, follow_log, hand_over, paused_hosts
from hpcrl.run.process import end, end_descendants
from hpcrl.run.role import read_plan
from hpcrl.run.rundir import BEATS, RunDir, listed
from hpcrl.toolbox.deadline import Deadline

PARTING = GRACE + 5.0  #: seconds that hosts may take to end by themselves after the attempt has failed
PAUSING = GRACE + 20.0  #: seconds until they have noticed that, looked into the kernel's log, and ended what is to end
LOOK = 0.2  #: seconds between two looks for hosts that are paused


@dataclass
class HostProcess:
    """A process of the launcher that stands for some hosts: a host's own, or a scheduler's step.

    Attributes:
        memory: what the kernel had killed before, where the process and what it stands for are on this host.
    """

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    memory: MemoryWatch | None = None

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it lives."""
        return self.process.poll()

    def lost(self) -> str:
        """How a host behind it is known to have died, whether it lives on itself or not; empty if none has."""
        return ""

    def log_into(self, folder: Path) -> None:
        """Have its log in the directory of another attempt's, too."""
        self.log = follow_log(self.log, folder)

    def end(self) -> None:
        """End it, if it has not ended by itself."""
        if self.status is None:
            end([psutil.Process(self.process.pid)], GRACE)


class HostHandle(Protocol):
    """What an attempt asks of the processes that stand for its hosts, wherever they are."""

    name: str
    log: Path
    memory: MemoryWatch | None

    @property
    def status(self) -> int | None: ...

    def lost(self) -> str: ...

    def log_into(self, folder: Path) -> None: ...

    def end(self) -> None: ...


@dataclass
class HeldHosts:
    """The hosts that a stage has now.

    Attributes:
        hosts: in the order of the plan.
        members: what stands for them; none before an attempt has begun, or once all have ended.
        carried: what the next attempt takes over; None where it starts every process.
    """

    hosts: list[Host] = field(default_factory=list)
    members: list[HostHandle] = field(default_factory=list)
    carried: CarriedOver | None = None
    lent: IO[bytes] | None = None  #: held open as long as the run has engines that it did not start
    _paused: RunDir | None = None

    @property
    def engines(self) -> Mapping[int, int]:
        """The engines that continue, and their incarnations."""
        return self.carried.engines if self.carried else {}

    def pause(self, rundir: RunDir, poll: Callable[[], None]) -> bool:
        """Wait until the failed attempt has ended on every host but for its engines.

        Returns:
            False where that does not come in time, or a host's own process has ended: then `end` is next.
        """
        try:
            records, plan = paused_hosts(rundir), read_plan(rundir)
        except HpcrlError:  # it failed before it had one
            return False
        deadline = Deadline(PAUSING)
        while self.members and not records.damaged and not deadline.over:
            poll()
            if any(member.status is not None or member.lost() for member in self.members):
                break
            names = {name for name in listed(rundir.here / BEATS) if not name.startswith(".")}
            records.look()
            if names and names <= records.found.keys() and _all_of(plan.hosts, records.found):
                self.carried = carried_over(plan, records.found.values())
                self._paused = rundir
                return True
            time.sleep(LOOK)
        return False

    def begin_again(self, rundir: RunDir) -> None:
        """Have the paused hosts begin this attempt, whose plan and keys are there.

        Raises:
            HpcrlError: if that cannot be written.
        """
        assert self._paused is not None and self.carried is not None, "pause() comes first"
        for member in self.members:
            member.log_into(rundir.logs)
        hand_over(self._paused, rundir, self.carried)
        self._paused = self.carried = None

    def end(self, rundir: RunDir, poll: Callable[[], None]) -> None:
        """End all of it everywhere: hosts are told through the run directory, what is left after that is ended
        here."""
        if any(m.status is None for m in self.members):
            with contextlib.suppress(OSError):  # a file system that takes nothing must not hide why it has ended
                (self._paused or rundir).request_end()
        deadline = Deadline(PARTING)
        while any(m.status is None for m in self.members) and not deadline.over:
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


def _all_of(hosts: Iterable[str], names: Collection[str]) -> bool:
    """Whether each host is there, under its own name or those of its slots."""
    return all(host in names or any(name.startswith(f"{host}-") for name in names) for host in hosts)
