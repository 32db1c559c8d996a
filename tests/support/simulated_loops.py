"""The three loops over simulated engines, in made-up time: how much trainer and engines idle.

The generator of the rollout process, the schedule of the trainer and the count of idle engines are hpcrl's own; engines,
trainer and time are simulated.  An engine answers SLOTS requests at once, each as long as a log-normal distribution
says; a batch is `waves` times what the engines can answer at once, in groups of GROUP; a weight update pauses the
engines for the share UPDATE of the time of a batch.  The trainer takes 0.75 or 1.25 times that long for a step: in the
one case the engines are the bottleneck, in the other the trainer is.

Invariants: a request takes its drawn time, longer by as much as engines were paused meanwhile; each token has the
policy version that the engines had when it was due.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcrl.config.options import Options
from hpcrl.rollout.batch_assembly import check_staleness
from hpcrl.rollout.engines.load import EngineMetrics, Loads
from hpcrl.rollout.generation.generator import GeneratedRollout, RolloutGenerator
from hpcrl.rollout.generation.group_store import GroupStore
from hpcrl.rollout.prompts.prompt_files import Prompt, PromptFile
from hpcrl.rollout.prompts.prompt_source import PromptSource
from hpcrl.rollout.samplers.sampler import ResponseRequest
from hpcrl.run.rundir import RunDir
from hpcrl.sample import Sample
from hpcrl.trainer.loop_schedule import publishes, settles
from hpcrl.utils.sample_parts import COMPLETED
from tests.support.virtual_time import simulate

SLOTS = 4
GROUP = 8
UPDATE = 0.01
EDGE = 3  #: steps at either end that are not counted
CASES = {"engines": 0.75, "trainer": 1.25}
LOOPS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"loop": "async"},
    "fully-async": {"loop": "fully-async", "max_staleness": 2},
}
TOKENS_PER_SECOND = 100
MEAN = 2.0  #: seconds of a response


def response_of(group: int, index: int) -> tuple[int, float]:
    """(tokens, seconds) of a response, long-tailed; the same for the same numbers."""
    seconds = random.Random(group * GROUP + index).lognormvariate(0, 0.6) / np.exp(0.18) * MEAN
    return max(1, int(seconds * TOKENS_PER_SECOND)), seconds


class Engines:
    """`count` engines of `each` slots, and the sampler that asks them."""

    def __init__(self, count: int, each: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._each = each
        self.loads = Loads(each, lambda: int(self._loop.time() * 1e6))
        for number in range(count):
            self.loads.add(number)
        self._waiting: deque[asyncio.Future[None]] = deque()
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
        tokens, seconds = response_of(asked.group.number, asked.index)
        while self.loads[engine := self.loads.least()] >= self._each:
            turn = self._loop.create_future()
            self._waiting.append(turn)
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
            if not (turn := self._waiting.popleft()).done():
                turn.set_result(None)
                return

    async def look(self) -> list[EngineMetrics]:
        """What engines say of themselves."""
        waiting = sum(not turn.done() for turn in self._waiting) / len(self.loads)
        return [EngineMetrics(self.loads[number], waiting, 0.0) for number in range(len(self.loads))]

    async def abort(self) -> None:
        """Nothing is ended early here."""

    def _sample(self, asked: ResponseRequest, count: int, begun: float) -> Sample:
        due = np.linspace(begun, self._loop.time(), count + 1)[1:]
        versions = np.asarray(self._versions, np.int32)[np.searchsorted(self._at, due, "right") - 1]
        return Sample(
            group_index=asked.group.number,
            response_index=asked.index,
            tokens=np.ones(len(asked.group.prompt.tokens) + count, np.int32),
            response_length=count,
            loss_mask=np.ones(count, np.uint8),
            rollout_log_probs=np.zeros(count, np.float32),
            versions=versions,
            reward=float(asked.index),
            status=COMPLETED,
            response="",
            metadata={},
        )


class Shares(NamedTuple):
    """Idle shares of trainer, engines and slots; stale: policy versions; longer: the time of a step over the
    bottleneck's own."""

    trainer: float
    engines: float
    slots: float
    stale: int
    longer: float


class Rollouts:
    """What the rollout process does when the trainer calls (rollout/policy_rollouts.py), without queue and files."""

    def __init__(self, options: Options, engines: Engines, root: Path, total: int) -> None:
        self.options = options
        rundir = RunDir.create(root)
        rundir.make_attempt()
        prompts = tuple(Prompt(i, np.asarray([i], np.int32)) for i in range(64))
        self.store = GroupStore(options, PromptSource(PromptFile(Path("p"), prompts, 0, ""), 3, True), rundir)
        self.store._kept = False  # groups on disk are no matter of overlap, and would be most of what this costs
        self.store.restore(0, None)
        look = engines.look if options.never_waits else None
        self.generator = RolloutGenerator(options, self.store, engines, engines.abort, look, total)
        self.made: dict[int, asyncio.Task[GeneratedRollout]] = {}
        self.last: asyncio.Task[GeneratedRollout] | None = None

    async def generate(self, rollout_id: int, version: int, consumed: int) -> None:
        self.generator.publish(version)
        if self.last is not None:
            await asyncio.wait([self.last])
        self.last = self.made[rollout_id] = asyncio.create_task(self._make(rollout_id, version, consumed))

    async def _make(self, rollout_id: int, version: int, consumed: int) -> GeneratedRollout:
        made = await self.generator.make(rollout_id, version, consumed)
        check_staleness(made.rollout.samples(), consumed, self.options.staleness_bound)
        return made

    async def fetch(self, rollout_id: int) -> GeneratedRollout:
        return await self.made.pop(rollout_id)

    async def snapshot(self, rollout_id: int, settle: bool) -> None:
        if settle and self.last is not None:
            await asyncio.wait([self.last])
        self.generator.trainer_is_waiting()
        self.store.train(rollout_id, 0)


async def one_run(options: Options, count: int, factor: float, steps: int, root: Path) -> Shares:
    """A run of `steps` steps; factor: the trainer's time over that of the engines."""
    engines = Engines(count, SLOTS)
    rollouts = Rollouts(options, engines, root, steps)
    loop, ahead = asyncio.get_running_loop(), options.runs_ahead
    batch = options.rollout_batch_size * GROUP * MEAN / (count * SLOTS)
    pause, step = UPDATE * batch, (factor - UPDATE) * batch
    version = published = 0
    asked = -1
    waits = []
    ends = [0.0]
    oldest = 0

    async def generate(rollout_id: int, at: int) -> None:
        nonlocal asked
        if asked < rollout_id < steps:
            await rollouts.generate(rollout_id, published, version + rollout_id - at)
            asked = rollout_id

    idle = []
    for rollout_id in range(steps):
        begun = loop.time()
        await generate(rollout_id, rollout_id)
        made = await rollouts.fetch(rollout_id)
        waited = loop.time() - begun
        oldest = max(oldest, version - min(int(sample.array("versions").min()) for sample in made.rollout.samples()))
        if ahead:
            await generate(rollout_id + 1, rollout_id)
        await asyncio.sleep(step)
        publishing = publishes(options, rollout_id, False)
        settling = loop.time()
        await rollouts.snapshot(rollout_id, settles(options, publishing))
        waited += loop.time() - settling
        version += 1
        if publishing:
            await engines.update(version, pause)
            published = version
        if ahead:
            pausing = loop.time()
            await generate(rollout_id + 2, rollout_id + 1)
            waited += loop.time() - pausing
        waits.append(waited)
        ends.append(loop.time())
        idle.append(engines.loads.measures())
    await rollouts.generator.close()
    kept = slice(EDGE, steps - EDGE)
    times = np.diff(ends)[kept]

    def weigh(name: str) -> float:
        return float(np.average([row[name] for row in idle][kept], weights=times))

    return Shares(
        float(np.sum(waits[kept]) / times.sum()),
        weigh("perf/engine_idle_ratio"),
        1 - weigh("perf/engine_occupancy"),
        oldest,
        float(times.mean() / (max(factor, 1 + UPDATE) * batch)),
    )


def measure(count: int, waves: int, bottleneck: str, loop: str, steps: int) -> Shares:
    """What a run of `steps` steps over `count` engines comes to."""
    options = Options(
        rollout_batch_size=count * SLOTS * waves // GROUP,
        n_samples_per_prompt=GROUP,
        rm_type="math",
        use_tis=True,
        **LOOPS[loop],
    )
    with tempfile.TemporaryDirectory() as scratch:
        return simulate(one_run(options, count, CASES[bottleneck], steps, Path(scratch) / "run"))
