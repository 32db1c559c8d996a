"""Start the ended engines and sandbox servers of one host again.

--attempts limits how often an engine starts again in an attempt.  A sandbox server starts again whenever it has ended,
after pauses that grow.

Invariants: an engine has one process at a time, and each process has its own incarnation.  A role that does not start
again stays among the host's roles, where it counts as a failure.  A server that has never served does not start again:
its error is the attempt's error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from hpcrl.launch.roles import SANDBOX, Role
from hpcrl.run.engine_files import PAUSE, limit_after, record_end, starts_again, was_up
from hpcrl.run.peers import SandboxPeer, newest
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir
from hpcrl.utils.waiting import Pauses

PAUSES = Pauses(PAUSE, 60.0)  #: between the end of a server of sandboxes and its next start


class _Restarter:
    """Starts processes of one role; begin(role, index, command) starts one.

    Attributes:
        commands: of each process, by index.
        incarnations: the newest of each.
    """

    name: str

    def __init__(
        self,
        rundir: RunDir,
        commands: Mapping[int, list[str]],
        begin: Callable[[str, int, list[str]], Role],
        incarnations: Mapping[int, int],
    ) -> None:
        self.rundir = rundir
        self._commands = commands
        self._begin = begin
        self.incarnations = dict.fromkeys(commands, 0) | dict(incarnations)
        self._due: dict[int, float] = {}  # those between two incarnations, and when the next begins

    def _ended(self, roles: list[Role]) -> list[Role]:
        return [role for role in roles if role.name == self.name and role.status is not None]

    def _start_due(self, roles: list[Role]) -> None:
        for index in [index for index, due in self._due.items() if due <= time.monotonic()]:
            del self._due[index]
            self.incarnations[index] += 1
            again = ["--incarnation", str(self.incarnations[index])]
            roles.append(self._begin(self.name, index, [*self._commands[index], *again]))


class EngineRestarter(_Restarter):
    """Keeps the engines of `host`.

    Attributes:
        limit: --attempts less one.
    """

    name = "engine"

    def __init__(
        self,
        rundir: RunDir,
        host: str,
        limit: int,
        commands: Mapping[int, list[str]],
        begin: Callable[[str, int, list[str]], Role],
        incarnations: Mapping[int, int] | None = None,
        oom_retries: int = 0,
    ) -> None:
        """Create one.

        Args:
            incarnations: of engines that an earlier attempt has started; 0 of all others.
        """
        super().__init__(rundir, commands, begin, incarnations or {})
        self.host = host
        self._limit = limit
        self._oom_retries = oom_retries
        self._first = dict(self.incarnations)  # of this attempt

    def restart_ended(self, roles: list[Role]) -> None:
        """Take ended engines that may start again out of `roles`, and put started ones in."""
        now = time.monotonic()
        for role in self._ended(roles):
            index, incarnation, first = role.index, self.incarnations[role.index], self._first[role.index]
            why = role.exit_report()
            limit = limit_after(why, self._limit, self._oom_retries, self.rundir)
            if not starts_again(limit, incarnation, was_up(self.rundir, index, incarnation), first):
                continue
            record_end(self.rundir, index, self.host, incarnation, limit, True, why, first)  # unless it has done so
            say(f"{why}; it is started again ({incarnation - first + 1} of {limit})")
            roles.remove(role)
            self._due[index] = now + PAUSE
        self._start_due(roles)


class SandboxRestarter(_Restarter):
    """Keeps the servers of sandboxes of a host."""

    name = SANDBOX

    def restart_ended(self, roles: list[Role]) -> None:
        """Take ended servers that may start again out of `roles`, and put started ones in."""
        now = time.monotonic()
        for role in self._ended(roles):
            if newest(self.rundir, SandboxPeer, role.index) is not None:
                say(f"{role.exit_report()}; it is started again")
                roles.remove(role)
                self._due[role.index] = now + PAUSES.after(self.incarnations[role.index] + 1)
        self._start_due(roles)
