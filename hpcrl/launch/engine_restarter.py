"""The engines of one host: what has ended is started again, as often as it may be in an attempt.

Invariants: an engine has one process at a time, and its own incarnation for each; what is not started again stays
among the host's roles, where it is taken for the failure that it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from hpcrl.run.engine_files import PAUSE, limit_after, record_end, starts_again, was_up
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir


class Kept(Protocol):
    """A process of an engine.  status: of its exit, None while it lives."""

    name: str
    index: int

    @property
    def status(self) -> int | None: ...

    def exit_report(self) -> str: ...


R = TypeVar("R", bound=Kept)


class EngineRestarter:
    """Keeps the engines of `host`; begin(role, index, command) starts one.

    Attributes:
        limit: --attempts less one.
        commands: of each engine, by index.
        incarnations: the newest of each engine.
    """

    def __init__(
        self,
        rundir: RunDir,
        host: str,
        limit: int,
        commands: Mapping[int, list[str]],
        begin: Callable[[str, int, list[str]], R],
        incarnations: Mapping[int, int] | None = None,
        oom_retries: int = 0,
    ) -> None:
        """Create one.

        Args:
            incarnations: of engines that an earlier attempt has started; 0 of all others.
        """
        self.rundir = rundir
        self.host = host
        self._limit = limit
        self._oom_retries = oom_retries
        self._commands = commands
        self._begin = begin
        self.incarnations = dict.fromkeys(commands, 0) | dict(incarnations or {})
        self._first = dict(self.incarnations)  # of this attempt
        self._due: dict[int, float] = {}  # engines between two incarnations, and when the next begins

    def restart_ended(self, roles: list[R]) -> None:
        """Take ended engines that may start again out of `roles`, and put started ones in."""
        now = time.monotonic()
        for role in [r for r in roles if r.name == "engine" and r.status is not None]:
            index, incarnation, first = role.index, self.incarnations[role.index], self._first[role.index]
            why = role.exit_report()
            limit = limit_after(why, self._limit, self._oom_retries, self.rundir)
            if not starts_again(limit, incarnation, was_up(self.rundir, index, incarnation), first):
                continue
            record_end(self.rundir, index, self.host, incarnation, limit, True, why, first)  # unless it has done so
            say(f"{why}; it is started again ({incarnation - first + 1} of {limit})")
            roles.remove(role)
            self._due[role.index] = now + PAUSE
        for index in [index for index, due in self._due.items() if due <= now]:
            del self._due[index]
            self.incarnations[index] += 1
            roles.append(
                self._begin("engine", index, [*self._commands[index], "--incarnation", str(self.incarnations[index])])
            )
