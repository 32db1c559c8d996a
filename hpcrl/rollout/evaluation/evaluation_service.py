"""The evaluations of a run: begun when the trainer asks, and asked for again until they are done.

Invariants: one at a time; none has an answer of weights that are older than those it is of; where training continues
during one, so that newer weights may reach it, what it says of itself tells which policy versions have answered; an
error in it ends the role at once, whether or not anybody asks just then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from hpcrl.config.options import Options
from hpcrl.report.timeline.spans import EVALUATE, Timeline
from hpcrl.rollout.async_tasks import cancel
from hpcrl.rollout.batch_assembly import check_staleness
from hpcrl.rollout.engines.engine_client import EngineClient
from hpcrl.rollout.engines.engine_pool import EnginePool
from hpcrl.rollout.evaluation.custom_evaluator import CustomEvaluator, Evaluated
from hpcrl.rollout.evaluation.evaluator import Evaluator, answered_by
from hpcrl.rollout.inputs import RolloutInputs
from hpcrl.rollout.samplers.sampler import SingleTurnSampler
from hpcrl.rollout.saved_rollouts import write_samples
from hpcrl.run.role import say
from hpcrl.sample import Sample
from hpcrl.transport.messages import UNFINISHED

#: (work, what is late) -> its result within `Options.rollout_timeout`
InTime = Callable[[Coroutine[Any, Any, dict[str, Any]], Callable[[], str]], Coroutine[Any, Any, dict[str, Any]]]


class EvaluationService:
    """Of one attempt.

    Attributes:
        samples: the folder where responses are written.
        failed: called with a task that has ended.
    """

    def __init__(
        self,
        options: Options,
        work: RolloutInputs,
        pool: EnginePool,
        client: EngineClient,
        samples: Path,
        timeline: Timeline,
        in_time: InTime,
        failed: Callable[[asyncio.Task[Any]], None],
    ) -> None:
        self._options = options
        self._work = work
        self._pool = pool
        self._samples = samples
        self._timeline = timeline
        self._in_time = in_time
        self._failed = failed
        self._evaluator: Evaluator | None = None
        self._own: CustomEvaluator | None = None
        if work.held_out:
            sampler = work.custom or SingleTurnSampler(options, work.tokenizer, client, work.grading)
            self._evaluator = Evaluator(options, work.tokenizer, sampler)
            if (own := work.hooks.only("eval_function_path")) is not None:
                self._own = CustomEvaluator(options, self._evaluator, work.held_out, own)
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._to_the_end = False  # a stop does not end it: nothing comes after it, or no resumed run makes up for it
        self._stopping = False

    async def evaluate(
        self, rollout_id: int, version: int, patience: float | None = None, while_training: bool = False
    ) -> dict[str, Any]:
        """{set name: accuracy, ...} of the weights after `rollout_id`; {} if the run was asked to stop meanwhile.

        Args:
            patience: seconds after which the answer is {UNFINISHED: ...}, and the same is to be asked again.
            while_training: the trainer trains meanwhile, and publishes weights.
        """
        if self._task is None:
            last = rollout_id + 1 >= self._work.total
            self._to_the_end = last or (self._options.runs_ahead and not while_training)
            if self._evaluator is None or (self._stopping and not self._to_the_end):
                return {}
            late = f"the held-out samples after rollout {rollout_id}"
            self._task = asyncio.create_task(
                self._in_time(self.make(rollout_id, version, while_training), lambda: late)
            )
            self._task.add_done_callback(self._failed)
        done, _ = await asyncio.wait([self._task], timeout=patience)
        if not done:
            return {UNFINISHED: {}}
        task = self._task
        self._task = None
        return {} if task.cancelled() else task.result()

    async def stop(self) -> None:
        """The run is asked to stop: an evaluation that a resumed run will make is given up."""
        self._stopping = True
        if not self._to_the_end:
            await cancel(self._task)

    async def close(self) -> None:
        """Cancel whatever is at work."""
        await cancel(self._task)

    async def make(self, rollout_id: int, version: int, while_training: bool = False) -> dict[str, Any]:
        """What is logged of an evaluation, by set; its responses are written down."""
        assert self._evaluator is not None
        await self._pool.connect()
        at, found = self._timeline.now(), dict[str, Any]()
        every: dict[str, list[Sample]] = {}
        made = await self._own.make(rollout_id, version) if self._own else Evaluated({}, {})
        for held in self._work.held_out:
            if held.name in made.numbers and held.name not in made.samples:
                continue
            samples = every[held.name] = made.samples.get(held.name) or await self._evaluator.samples(held, version)
            newest = max(int(sample.array("versions").max()) for sample in samples) if while_training else version
            check_staleness(samples, newest, newest - version)
            await asyncio.to_thread(write_samples, self._samples / f"eval-{held.name}-{rollout_id}.jsonl", samples)
            found[held.name] = held.results(samples, self._options.log_passrate)
            if while_training:
                found[held.name] |= answered_by(samples, version)
            what = "accuracy" if found[held.name]["right_or_wrong"] else "reward"
            say(f"evaluation after rollout {rollout_id}: {held.name} {what} {found[held.name]['accuracy']:.3f}")
        for name, row in made.numbers.items():
            found[name] = found.get(name, {}) | row
        self._timeline.add(EVALUATE, at, self._timeline.now(), rollout_id=rollout_id)
        return await self._work.hooks.log_evaluation(rollout_id, every, found)
