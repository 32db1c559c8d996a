"""The rollout queue of hpcrl: one rank, a share a batch, requests and answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from bench.queue_roles.work import DIFFERENT, Control, Passes, batches, read, timed
from hpcrl.plan import Location, Plan
from hpcrl.run.rundir import RunDir
from hpcrl.transport import auth
from hpcrl.transport.client import QueueClient
from hpcrl.transport.server import QueueServer
from hpcrl.transport.share_format import SampleBatch, Share

PLAN = Plan("bench", 0, (Location("127.0.0.1", (0,)),), (), Location("127.0.0.1", ()))
DEPTH = 4
MICRO_BATCHES = [[[row] for row in range(256)]]


class BoundedServer(QueueServer):
    """Which lets the producer wait, as a trainer that asks for one rollout after another does."""

    def __init__(self, rundir: RunDir) -> None:
        super().__init__(rundir, PLAN, 1, {})
        self.taken = asyncio.Event()

    async def _fetch(self, *asked: Any) -> None:
        await super()._fetch(*asked)
        self.taken.set()

    async def room(self) -> None:
        """Wait until fewer than DEPTH shares wait for the trainer."""
        while len(self._ranks[0].shares) >= DEPTH:
            self.taken.clear()
            await self.taken.wait()


def produce(control: Control, passes: Passes, scratch: Path) -> None:
    rundir = RunDir.create(scratch / "run")
    rundir.make_attempt()
    auth.make_keys(rundir, 1)
    asyncio.run(_serve(control, passes, BoundedServer(rundir)))


async def _serve(control: Control, passes: Passes, server: BoundedServer) -> None:
    work, number = batches(), 0
    await server.start()
    control.tell("up")
    for _ in range(passes.warm + passes.timed):
        await asyncio.to_thread(control.hear)
        for _ in range(passes.batches):
            samples = work[number % DIFFERENT]
            share = Share(number, 0, SampleBatch.from_samples(samples), MICRO_BATCHES, [len(samples)], [0], {})
            await server.room()
            await server.put(number, [share])
            number += 1
    await asyncio.to_thread(control.hear)
    await server.close()


def consume(control: Control, passes: Passes, scratch: Path) -> list[float]:
    control.hear()
    client = QueueClient(RunDir(scratch / "run"), PLAN, 0, 1, 60)

    def receive(number: int) -> int:
        share = client.fetch(number)
        assert share is not None
        return read(share.batch.tokens, share.batch.loss_mask)

    seconds = timed(control, passes, receive)
    client.close()
    return seconds
