"""The sandboxes of one host: their server is started again whenever it has ended, after pauses that grow.

Invariant: one that has never served is not started again: what it says of itself is the attempt's error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from hpcrl.launch.engine_restarter import Kept
from hpcrl.launch.roles import SANDBOX
from hpcrl.run.engine_files import PAUSE
from hpcrl.run.peers import SandboxPeer, newest
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir
from hpcrl.utils.retry import Pauses

PAUSES = Pauses(PAUSE, 60.0)  #: between the end of a server and its next start

R = TypeVar("R", bound=Kept)


class SandboxRestarter(Generic[R]):
    """Keeps the servers of a host; begin(role, index, command) starts one.

    Args:
        commands: of each server, by index.
    """

    def __init__(
        self, rundir: RunDir, commands: Mapping[int, list[str]], begin: Callable[[str, int, list[str]], R]
    ) -> None:
        self._rundir = rundir
        self._commands = commands
        self._begin = begin
        self._starts = dict.fromkeys(commands, 0)
        self._due: dict[int, float] = {}

    def restart_ended(self, roles: list[R]) -> None:
        """Take ended servers that may start again out of `roles`, and put started ones in."""
        now = time.monotonic()
        for role in [r for r in roles if r.name == SANDBOX and r.status is not None]:
            if newest(self._rundir, SandboxPeer, role.index) is None:
                continue
            say(f"{role.exit_report()}; it is started again")
            roles.remove(role)
            self._due[role.index] = now + PAUSES.after(self._starts[role.index] + 1)
        for index in [index for index, due in self._due.items() if due <= now]:
            del self._due[index]
            self._starts[index] += 1
            more = ["--incarnation", str(self._starts[index])]
            roles.append(self._begin(SANDBOX, index, [*self._commands[index], *more]))
