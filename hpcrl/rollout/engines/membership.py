"""Where the registry of engines meets the world: what supervisors say goes in, what the trainer asks is answered.

    engines                 who is to be given weights, and who waits for them
    engines_updated         those that now hold a version

Invariant: the registry changes in this process's event loop alone; who is in doubt is asked again until its supervisor,
or itself, has said how it is.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from hpcrl.engine.membership.http import CORE, answer
from hpcrl.engine.membership.registry import Engine, Registry
from hpcrl.errors import PeerError
from hpcrl.rollout.engines.engine_pool import EnginePool
from hpcrl.run.engine_files import EngineView, write_views
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir

LOOK = 1.0  #: seconds between two looks for what supervisors have said
DOUBT = 2.0  #: seconds between two questions to an engine that is in doubt
VIEW = 5.0  #: seconds after which the view from outside is written again
LAST_WORDS = 8.0  #: seconds that a supervisor may take to say why the last engine has ended


class EngineMembership:
    """The members of one attempt; `keep` runs as long as the rollout process does."""

    def __init__(self, rundir: RunDir, pool: EnginePool) -> None:
        self._rundir = rundir
        self._pool = pool
        self._written: tuple[float, list[EngineView]] = (0.0, [])
        self._asked = 0.0

    @property
    def _registry(self) -> Registry:
        return self._pool.registry

    # ---- what the trainer calls

    async def engines(self) -> dict[str, Any]:
        """update: [index, incarnation, host, port] of all that the next update goes to; waiting: of those that wait for
        one;
        starting: those that have not come up yet, by name; published: the version that the others hold."""
        self._pool.poll_engines()
        registry = self._registry
        return {
            "update": [self._where(m) for m in registry.to_update()],
            "waiting": [self._where(m) for m in registry.waiting()],
            "starting": [str(m) for m in registry.starting()],
            "published": registry.published,
        }

    async def engines_updated(self, engines: list[list[Any]], version: int, alone: bool = False) -> dict[str, Any]:
        """These (index, incarnation) now hold `version`.

        Args:
            alone: which the others hold already.
        """
        who = [(index, incarnation) for index, incarnation, *_ in engines]
        (self._registry.joined if alone else self._registry.updated)(who, version)
        if alone:
            say(f"{', '.join(str(self._registry.members[index]) for index, _ in who)} joined with version {version}")
        self._pool.refresh()
        return {}

    def _where(self, member: Engine) -> list[Any]:
        return [member.index, member.incarnation, member.address.host, member.address.port]

    # ---- in the background

    async def keep(self) -> None:
        """Keep the registry true, for ever.

        Raises:
            PeerError: once no engine is left that could answer.
        """
        try:
            await self._keep()
        finally:
            self._show()  # the last change, which may have come since the last look

    async def _keep(self) -> None:
        hopeless_since = None
        while self._registry.members:
            self._pool.poll_engines()
            await self._ask_again()
            self._show()
            now = time.monotonic()
            if not (why := self._registry.hopeless()):
                hopeless_since = None
            elif now - (hopeless_since := hopeless_since or now) > LAST_WORDS:
                raise PeerError(why, f"see the engines' logs in {self._rundir.logs}")
            await asyncio.sleep(LOOK)

    async def _ask_again(self) -> None:
        """Find out how those are that were in doubt: not whether the server listens, but whether its core works."""
        doubted = [m for m in self._registry.in_doubt() if m.address is not None]
        if not doubted or time.monotonic() < self._asked + DOUBT:
            return
        asked = [(m.index, m.incarnation) for m in doubted]
        found = await asyncio.gather(*(answer(m.address, CORE) for m in doubted))
        self._asked = time.monotonic()
        for (index, incarnation), (status, _) in zip(asked, found, strict=True):
            if status == 200:
                self._registry.well(index, incarnation)
        self._pool.refresh()

    def _show(self) -> None:
        """Write how the engines are, if that has changed or is old."""
        views = [self._view(m) for m in self._registry.members.values()]
        when, old = self._written
        if [_lasting(v) for v in views] != [_lasting(v) for v in old] or time.monotonic() > when + VIEW:
            self._written = time.monotonic(), views
            write_views(self._rundir, self._registry.published, views)

    def _view(self, m: Engine) -> EngineView:
        requests = self._pool.requests(m.index)
        return EngineView(
            index=m.index,
            host=m.host,
            state=m.state,
            version=m.version,
            requests=requests,
            restarts=m.restarts,
            why=m.why,
        )


def _lasting(view: EngineView) -> tuple[Any, ...]:
    """What of a view is worth being written at once."""
    return view.index, view.state, view.version, view.restarts, view.why
