"""Simulated engines: each answers as many requests at once as it may, as long as a recorded trace says.

Invariants: a request takes its recorded time, longer by as much as engines were paused meanwhile; each token has the
policy version that the engines had when it was due.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import random
from pathlib import Path

import numpy as np

from hpcrl.engines.load import Loads
from hpcrl.rollout.engines.concurrency_limit import EngineMetrics
from hpcrl.rollout.samplers.sampler import ResponseRequest
from hpcrl.sample import COMPLETED, Sample


class Trace:
    """Recorded responses, to draw from.  Lengths in tokens, times in seconds."""

    def __init__(self, path: Path) -> None:
        found = json.loads(path.read_text())
        self.tokens = found["tokens"]
        self.seconds = found["seconds"]
        self.group = found["group"]
        self.mean = sum(self.seconds) / len(self.seconds)
        self.about = {name: value for name, value in found.items() if name not in ("tokens", "seconds")}

    def of(self, group: int, index: int) -> tuple[int, float]:
        """(tokens, seconds) of a response: a recorded group is drawn for each, by its number, and stays together."""
        first = self.group * random.Random(group).randrange(len(self.tokens) // self.group)
        at = first + index % self.group
        return self.tokens[at], self.seconds[at]

    def longest(self, group: int) -> float:
        """Seconds of the longest response of a group."""
        return max(self.of(group, index)[1] for index in range(self.group))


class Engines:
    """A fleet, and the sampler that asks it: what goes between a rollout's making and real engines is not simulated
    here.

    foresees: of the requests that wait, those of the group with the longest response go first, which nobody can know;
    else the first.
    """

    def __init__(self, count: int, each: int, trace: Trace, foresees: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._each = each
        self._trace = trace
        self._foresees = foresees
        self.loads = Loads(each, lambda: int(self._loop.time() * 1e6))
        for number in range(count):
            self.loads.add(number)
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []  # in the order in which they go
        self._came = 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._paused = self._paused_at = 0.0
        # when which policy came
        self._at = [0.0]
        self._versions = [0]

    # ---- weights

    async def update(self, version: int, seconds: float) -> None:
        """New weights: requests are kept, and go on when they are there."""
        self._resumed.clear()
        self._paused_at = self._loop.time()
        await asyncio.sleep(seconds)
        self._paused += seconds
        self._at.append(self._loop.time())
        self._versions.append(version)
        self._resumed.set()

    def _lost(self) -> float:
        """Seconds that were spent in pauses up to now."""
        return self._paused + (0.0 if self._resumed.is_set() else self._loop.time() - self._paused_at)

    async def _work(self, seconds: float) -> None:
        """So long of an engine's work."""
        while seconds > 1e-9:
            await self._resumed.wait()
            before = self._lost()
            await asyncio.sleep(seconds)
            seconds = self._lost() - before

    # ---- samples

    async def make(self, asked: ResponseRequest) -> list[Sample]:
        """A response, as a sampler makes it."""
        tokens, seconds = self._trace.of(asked.group.number, asked.index)
        while self.loads[engine := self.loads.least()] >= self._each:
            turn = self._loop.create_future()
            self._came = self._came + 1
            bisect.insort(
                self._waiting, (-self._trace.longest(asked.group.number) if self._foresees else 0.0, self._came, turn)
            )
            await turn
        self.loads.move(engine, 1)
        begun = self._loop.time()
        try:
            await self._work(seconds)
        finally:
            self.loads.move(engine, -1)
            self._next()
        return [self._sample(asked, tokens, begun)]

    def _next(self) -> None:
        """There is room for one that waits."""
        while self._waiting:
            if not (turn := self._waiting.pop(0)[2]).done():
                turn.set_result(None)
                return

    async def look(self) -> list[EngineMetrics]:
        """What engines say of themselves."""
        waiting = sum(not turn.done() for *_, turn in self._waiting) / len(self.loads)
        return [EngineMetrics(self.loads[number], waiting, 0.0) for number in range(len(self.loads))]

    async def abort(self) -> None:
        """Nothing is ended early here."""

    def _sample(self, asked: ResponseRequest, count: int, begun: float) -> Sample:
        due = np.linspace(begun, self._loop.time(), count + 1)[1:]
        versions = np.asarray(self._versions, np.int32)[np.searchsorted(self._at, due, "right") - 1]
        return Sample(
            asked.group.number,
            asked.index,
            np.ones(len(asked.group.prompt.tokens) + count, np.int32),
            count,
            np.ones(count, np.uint8),
            np.zeros(count, np.float32),
            versions,
            reward=float(asked.index),
            status=COMPLETED,
            response="",
            metadata={},
        )
