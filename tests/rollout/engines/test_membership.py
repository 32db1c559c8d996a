"""The registry at work: requests wait for engines that wait for weights, go elsewhere, and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.config.options import Options
from hpcrl.engine.membership.registry import Registry
from hpcrl.errors import PeerError
from hpcrl.plan import Location, Plan
from hpcrl.rollout.engines import membership as membership_module
from hpcrl.rollout.engines.completion import Sampling
from hpcrl.rollout.engines.engine_client import EngineClient
from hpcrl.rollout.engines.engine_pool import EnginePool
from hpcrl.rollout.engines.membership import EngineMembership
from hpcrl.run.engine_files import read_views, record_end
from hpcrl.run.peers import EnginePeer, publish
from hpcrl.run.rundir import RunDir
from hpcrl.transport.auth import make_keys
from tests.support.fake_engine import CUT, FakeEngine, Script, keys_of

SAMPLING = Sampling(temperature=1.0, max_tokens=8, stop=(), stop_token_ids=(1,))


class Office:
    """Fake engines with supervisors that say what the test says, a pool, its membership, and the client that asks."""

    def __init__(self, path: Path, stack: ExitStack, *scripts: Script | None) -> None:
        self.rundir = RunDir.create(path / "run")
        self.stack = stack
        self.rundir.make_attempt()
        make_keys(self.rundir, 1)
        self.engines = [self.engine(script) for script in scripts]
        self.plan = Plan(
            "test",
            0,
            (Location("a", (0,)),),
            tuple(Location("a", (i,)) for i in range(len(scripts))),
            Location("a", ()),
        )

    def engine(self, script: Script | None = None) -> FakeEngine:
        return self.stack.enter_context(FakeEngine(script, keys_of(self.rundir)))

    def up(self, index: int, engine: FakeEngine, incarnation: int = 0) -> None:
        publish(self.rundir, EnginePeer(host="127.0.0.1", port=engine.port, incarnation=incarnation), index)

    def run(self, job: Callable[[Office], Awaitable[None]]) -> None:
        async def go() -> None:
            options = Options(request_timeout=20)
            self.pool = EnginePool(self.rundir, self.plan, options, registry=Registry(2))
            self.membership, self.generator = EngineMembership(self.rundir, self.pool), EngineClient(self.pool, 128)
            keeping = asyncio.create_task(self.membership.keep())
            try:
                await asyncio.wait_for(job(self), 30)
            finally:
                keeping.cancel()
                await self.pool.close()

        asyncio.run(go())

    async def answer(self, seed: int = 1) -> Any:
        return await self.generator.complete(np.asarray([3, 20, 21], np.int32), SAMPLING, seed, 4)

    async def update(self, version: int, alone: bool = False) -> list[Any]:
        found = (await self.membership.engines())["waiting" if alone else "update"]
        await self.membership.engines_updated(found, version, alone)
        return [index for index, *_ in found]

    async def until(self, state: str, index: int = 0) -> None:
        while self.pool.registry.members[index].state != state:
            await asyncio.sleep(0.02)


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(membership_module, "CORE", "/health")  # all that a fake engine has
    monkeypatch.setattr(membership_module, "DOUBT", 0.1)
    monkeypatch.setattr(membership_module, "LOOK", 0.05)
    with ExitStack() as made:
        yield made


def test_nobody_is_asked_before_it_has_the_weights(tmp_path: Path, stack: ExitStack) -> None:
    async def job(office: Office) -> None:
        assert (await office.membership.engines())["starting"] == ["engine-0 on a", "engine-1 on a"]
        office.up(0, office.engines[0])
        office.up(1, office.engines[1])
        asked = asyncio.create_task(office.answer())
        await asyncio.sleep(0.3)
        assert not asked.done() and not any(engine.bodies for engine in office.engines)
        assert await office.update(4) == [0, 1]
        await asked
        record_end(office.rundir, 0, "a", 0, 2, True, "killed")
        await office.until("ended")
        again = office.engine()
        office.up(0, again, incarnation=1)
        await office.until("joining")
        await asyncio.gather(*(office.answer(seed) for seed in range(20)))
        assert not again.bodies, "it waits for its weights"
        assert await office.update(4, alone=True) == [0]
        await asyncio.gather(*(office.answer(seed) for seed in range(40)))
        assert again.bodies
        views = read_views(office.rundir.here)
        assert views.published == 4 and views.engines[0].restarts == 1

    Office(tmp_path, stack, None, None).run(job)


def test_request_waits_for_the_next_life(tmp_path: Path, stack: ExitStack) -> None:
    """With its only engine gone, a request waits until the engine is restarted."""

    def dies(engine: FakeEngine, count: int, body: dict[str, Any]) -> Any:
        engine.healthy = False
        return CUT

    async def job(office: Office) -> None:
        office.up(0, office.engines[0])
        await office.until("joining")
        await office.update(4)
        asked = asyncio.create_task(office.answer())
        await office.until("suspect")
        record_end(office.rundir, 0, "a", 0, 2, True, "killed")
        await office.until("ended")
        office.up(0, office.engine(), incarnation=1)
        await office.until("joining")
        assert not asked.done()
        await office.update(4, alone=True)
        await asked

    Office(tmp_path, stack, dies).run(job)


def test_doubted_engine_returns(tmp_path: Path, stack: ExitStack) -> None:
    """A suspect engine that is well serves again or joins again."""

    async def job(office: Office) -> None:
        office.up(0, office.engines[0])
        await office.until("joining")
        await office.update(4)
        office.engines[0].healthy = False
        office.pool.registry.suspect(0, 0, "a request failed")
        await asyncio.sleep(0.3)
        assert office.pool.registry.members[0].state == "suspect"
        office.engines[0].healthy = True
        await office.until("serving")

    Office(tmp_path, stack, None).run(job)


def test_without_any_engine_left_the_run_ends(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership_module, "LAST_WORDS", 0.2)

    async def job(office: Office) -> None:
        office.pool.registry.ended(0, 0, "killed", False)
        with pytest.raises(PeerError, match="no engine is left: engine-0 on a killed"):
            await office.membership.keep()

    Office(tmp_path, stack, None).run(job)
