"""The rollouts of one policy: answers what the trainer asks of it, makes the samples, and puts them into its queue.

Invariants: a rollout is handed over whole or not at all; a snapshot says where the data stands after its rollout, so a
run that is resumed from it continues with exactly the next prompts; an error here is recorded before anybody hears of
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.errors import DataError, HpcrlError
from hpcrl.report.timeline.spans import MAKE, Timeline
from hpcrl.rollout.async_tasks import as_hpcrl_error, cancel, within
from hpcrl.rollout.batch_assembly import ages, batch_metrics, check_staleness, make_shares
from hpcrl.rollout.engines.engine_client import EngineClient
from hpcrl.rollout.engines.engine_pool import EnginePool
from hpcrl.rollout.engines.load import AcceptedDrafts, read_metrics
from hpcrl.rollout.engines.membership import EngineMembership
from hpcrl.rollout.evaluation.evaluation_service import EvaluationService
from hpcrl.rollout.generation.custom_generator import CustomGenerator
from hpcrl.rollout.generation.generated_ahead import GeneratedAhead
from hpcrl.rollout.generation.generator import RolloutGenerator
from hpcrl.rollout.generation.group_store import GroupStore
from hpcrl.rollout.inputs import RolloutInputs
from hpcrl.rollout.prompts.custom_source import CustomSource
from hpcrl.rollout.samplers.custom import started
from hpcrl.rollout.samplers.sampler import LabelSampler, Sampler, SingleTurnSampler
from hpcrl.rollout.samplers.teacher_logprobs import Teacher, TeacherLogprobsSampler
from hpcrl.rollout.sandbox_tally import SandboxMeasures
from hpcrl.rollout.saved_rollouts import SavedRollouts, file_of, write_rollout, write_samples
from hpcrl.run.role import RoleContext, say
from hpcrl.run.rundir import STOP
from hpcrl.transport.messages import UNFINISHED
from hpcrl.transport.server import QueueServer
from hpcrl.weights.colocation import Event

T = TypeVar("T")


def _sampler(options: Options, work: RolloutInputs, client: EngineClient) -> Sampler:
    """What makes the responses."""
    if isinstance(work.source, SavedRollouts):
        return work.source
    if work.samples and work.custom is not None:
        return work.custom
    if work.samples and work.file is not None:
        return SingleTurnSampler(options, work.tokenizer, client, work.grading)
    return LabelSampler()


class PolicyRollouts:
    """Of one attempt, between `start_run` and `finish`.

    Args:
        failed: called with an error, which ends the process.
        finished: called at the end of the rollouts.
    """

    def __init__(
        self,
        context: RoleContext,
        work: RolloutInputs,
        pool: EnginePool,
        membership: EngineMembership,
        timeline: Timeline,
        failed: Callable[[BaseException], None],
        finished: Callable[[], None],
    ) -> None:
        self.context = context
        self.options = context.options
        self.work = work
        self.pool = pool
        self.timeline = timeline
        self._failed = failed
        self._finished = finished
        client = EngineClient(pool, work.tokenizer.vocab_size)
        if work.custom is not None:
            work.custom.use(client, lambda: self.pool.model_len)
        self.sampler = _sampler(self.options, work, client)
        asks = needs(self.options).teacher_server and work.file is not None  # what was saved has its teacher's words
        self.teacher = Teacher(self.options, work.tokenizer) if asks else None
        if self.teacher is not None:
            self.sampler = TeacherLogprobsSampler(self.sampler, self.teacher)
        samples = context.rundir.samples
        self.evaluations = EvaluationService(
            self.options, work, self.pool, client, samples, self.timeline, self._in_time, self._rollout_done
        )
        self.sandboxes = SandboxMeasures([one.pool.sandboxes for one in (work.custom, work.grading) if one is not None])
        self.store = GroupStore(self.options, work.source, context.rundir)
        self.drafts = AcceptedDrafts(self.pool.metrics_texts, self.options)
        look_at = functools.partial(read_metrics, self.pool.metrics_texts) if self.options.never_waits else None
        self.groups = RolloutGenerator(self.options, self.store, self.sampler, client.abort, look_at, work.total)
        self.generator: RolloutGenerator | CustomGenerator | GeneratedAhead = self.groups
        function = work.hooks.only("rollout_function_path")
        if function is not None and not isinstance(work.source, SavedRollouts):
            self.generator = CustomGenerator(self.options, self.store, self.sampler, function)
        self.generated_ahead: GeneratedAhead | None = None  # in the asynchronous loop that repeats bit for bit
        if self.options.runs_ahead and self.options.deterministic_mode:
            self.generator = self.generated_ahead = GeneratedAhead(
                self.options, self.store, context.rundir, self.generator
            )
        methods = (self.start_run, self.generate, self.snapshot, self.evaluations.evaluate, self.turn, self.finish)
        methods += (membership.engines, membership.engines_updated)
        handlers = {method.__name__: self._guarded(method) for method in methods}
        self.server = QueueServer(context.rundir, context.plan, self.options.data_parallel_size, handlers)
        self._next: int | None = None  # the rollout that the trainer asks for next; None before `start_run`
        self._making: asyncio.Task[None] | None = None
        self._made_id = -1  # the rollout of `_making`
        self._idle_since: float | None = None  # when the last rollout was done
        self._handed_over = -1  # the last rollout whose samples are in the queue
        self._stopping = False
        self._end_at: int | None = None  # the first rollout that a run that is asked to stop does not train on
        self._states: dict[int, dict[str, Any]] = {}
        self._stop_work: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Once this returns, the trainer can ask; whatever is wrong with rewards or functions has shown.

        Raises:
            HpcrlError: says what that is.
        """
        await started(self.work.grading, self.work.custom)
        if self.teacher is not None:
            await self.teacher.check()
        await self.server.start()
        say(self.work.said)

    async def fail(self, message: str) -> None:
        """Tell the trainer why nothing more will come."""
        with contextlib.suppress(Exception):
            await self.server.fail(message)

    async def halt(self) -> None:
        """End what is at work, while the engines can still be told."""
        await cancel(self._making)
        if self._stop_work is not None:
            await asyncio.wait([self._stop_work])
        await self.evaluations.close()
        await self.groups.close()

    async def close(self) -> None:
        """End the processes and let go of the queue."""
        for part in (self.teacher, self.work.custom, self.work.grading):
            if part is not None:
                await part.close()
        await self.server.close()
        self.store.close()

    # ---- what the trainer calls

    async def start_run(self, rollout_id: int, state: dict[str, Any] | None) -> dict[str, Any]:
        """Start at `rollout_id`, with the data where `state` (of the snapshot before it) says."""
        if state is not None:
            if state.get("rollout_id") != rollout_id - 1:
                raise DataError(
                    f"the checkpoint's data position is that of rollout {state.get('rollout_id')}, the run resumes at "
                    f"{rollout_id}"
                )
        elif rollout_id:
            raise DataError(f"the run resumes at rollout {rollout_id}, but its checkpoint holds no data position")
        self.store.restore(rollout_id, state)
        if self.generated_ahead is not None:
            self.generated_ahead.start_run(rollout_id)
        self._next = rollout_id
        return {"num_rollout": self.work.total}

    async def generate(
        self, rollout_id: int, version: int, consumed: int | None = None, patience: float | None = None
    ) -> dict[str, Any]:
        """Start making the samples of `rollout_id` under policy `version`; returns once what was asked for before is
        made.

        Args:
            consumed: the policy version of the trainer when it learns from them; None: the same.
            patience: as for `EvaluationService.evaluate`.
        """
        if self._stopping and not self._last_ahead(rollout_id):
            return {}
        if rollout_id != self._next:
            raise HpcrlError(f"rollout {rollout_id} was asked for, but {self._next} is next")
        self.groups.publish(version)
        if not await self._settled(patience):
            return {UNFINISHED: {}}
        if self._stopping and not self._last_ahead(rollout_id):
            return {}
        self._next = rollout_id + 1
        self._made_id = rollout_id
        self.work.hooks.rollout_id = rollout_id
        self._making = asyncio.create_task(self._make(rollout_id, version, version if consumed is None else consumed))
        self._making.add_done_callback(self._rollout_done)
        return {}

    async def _settled(self, patience: float | None) -> bool:
        """Wait until what is being made is made, or has failed; False if it is not within `patience` seconds."""
        return self._making is None or bool((await asyncio.wait([self._making], timeout=patience))[0])

    async def snapshot(
        self, rollout_id: int, saved: int = 0, settle: bool = False, patience: float | None = None
    ) -> dict[str, Any]:
        """The trainer has learned from `rollout_id`: where the data stands after it; its samples are on disk by then.

        Args:
            saved: the policy version of the newest checkpoint.
            settle: wait until what is made ahead is made, too.
            patience: as for `EvaluationService.evaluate`.
        """
        if (settle or self._made_id <= rollout_id) and not await self._settled(patience):
            return {UNFINISHED: {}}
        self.groups.trainer_is_waiting()
        if rollout_id not in self._states:
            raise HpcrlError(f"there is no snapshot of rollout {rollout_id}")
        await asyncio.to_thread(self.store.remove, self.store.learned(rollout_id, saved))
        if self.generated_ahead is not None:
            await asyncio.to_thread(self.generated_ahead.prune, rollout_id, saved)
        self._states = {number: state for number, state in self._states.items() if number >= rollout_id}
        return self._states[rollout_id]

    async def turn(self, event: str) -> dict[str, Any]:
        """What happens on the GPUs that trainer and engines share (`hpcrl.weights.colocation`)."""
        if event == Event.SLEEP:
            await self.stop_if_asked()  # the trainer may have seen it before us: nothing is to send requests any more
        await self.pool.turn(Event(event))
        return {}

    async def finish(self, rollout_id: int) -> dict[str, Any]:
        """End the rollouts, and the process once the answer is out.

        Args:
            rollout_id: the first that the trainer has not learned from; what a resumed run will have to make again is
                not waited for.
        """
        await self.stop_if_asked()
        if self._making is not None:
            if self.generated_ahead is None or self._made_id > rollout_id:
                await cancel(self._making)
            else:
                await asyncio.wait([self._making])
        await self.groups.close()
        say(f"finished at rollout {rollout_id}")
        self._finished()
        return {}

    # ---- the work

    async def _make(self, rollout_id: int, version: int, consumed: int) -> None:
        await self.pool.connect()
        await self.drafts.start_rollout()
        begun, at = time.monotonic(), self.timeline.now()
        waited = begun - (self._idle_since or begun)
        if self.groups.continuous and self._idle_since is not None:
            begun = self._idle_since  # it never stops making
        late = lambda: f"{self.generator} of rollout {rollout_id}"  # noqa: E731
        made = await self._in_time(self.generator.make(rollout_id, version, consumed), late)
        samples = made.rollout.samples()
        source = self.work.source.own if isinstance(self.work.source, CustomSource) else self.work.source
        await self.work.hooks.filter(samples, made.dropped, source=source)
        # with what a custom source has learned of the samples, unless more has been issued since
        self._states[rollout_id] = made.state or self.store.state(rollout_id)
        check_staleness(samples, consumed, self.options.staleness_bound)
        if self.options.save_debug_rollout_data is not None:
            path = file_of(self.options.save_debug_rollout_data, rollout_id)
            await asyncio.to_thread(write_rollout, path, rollout_id, consumed, samples)
        seconds = time.monotonic() - begun
        metrics = batch_metrics(
            made.rollout,
            consumed,
            seconds,
            sampled=self.work.samples,
            gpus=self.options.sampling_gpus,
            dropped=made.dropped,
            unknown=self.work.tokenizer.unknown,
        )
        metrics |= (
            self.pool.loads.measures() | self.work.source.metrics() | {"perf/rollout_wait_time": waited} | made.metrics
        )
        metrics |= await self.drafts.measures() | self.sandboxes.measures()
        if self.work.samples and self.options.staleness_bound != 0:
            metrics |= ages(samples, consumed)
        metrics = await self.work.hooks.log(samples, metrics, seconds)
        batch = await self.work.hooks.batch(samples, metrics)
        shares = make_shares(made.rollout, self.options, metrics, batch)
        self._handed_over = rollout_id
        self.timeline.add(MAKE, at, self.timeline.now(), rollout_id=rollout_id)  # from here on the trainer may train it
        await self.server.put(rollout_id, shares)
        await asyncio.to_thread(write_samples, self.context.rundir.samples / f"{rollout_id:08d}.jsonl", samples)
        words = [f"{name} {metrics[name]:.3f}" for name in ("rollout/reward", "perf/rollout_time") if name in metrics]
        say(f"rollout {rollout_id}: {', '.join(words)}")
        self._idle_since = time.monotonic()

    async def _in_time(self, work: Coroutine[Any, Any, T], what: Callable[[], str]) -> T:
        """The result of `work`, or DeadlineError, which names `what` was to come, a little before `rollout_timeout`:
        the trainer waits as long, and our error can say which engine is slow."""
        seconds = self.options.rollout_timeout

        def late() -> str:
            return f"{what()} were not there within {seconds:g} s, which --timeout-factor scales ({self.pool})"

        return await within(seconds - min(1.0, 0.1 * seconds), work, late)

    def _rollout_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    # ---- stopping and failing

    async def stop_if_asked(self, asked: bool | None = None) -> None:
        """If the run was asked to stop (None: look), wait until all is put away that a resumed run continues with; it
        is done once, and to its end, also when the first caller is cancelled meanwhile."""
        if self._stop_work is None and (STOP in self.context.rundir.signs() if asked is None else asked):
            self._stop_work = asyncio.create_task(self._stop())
        if self._stop_work is not None:
            await asyncio.shield(self._stop_work)

    async def _stop(self) -> None:
        """Make nothing more, and drop what is being made; the trainer sees by itself that it is to end."""
        self._stopping = True
        await self.evaluations.stop()
        if self._next is None:
            return
        end = self._next
        if self._making is not None and not self._making.done() and self._handed_over != end - 1:
            end -= 1
            if self.generated_ahead is None:
                await cancel(self._making)
                self._next = end
        await self.groups.stop()
        self._end_at = end

    def _last_ahead(self, rollout_id: int) -> bool:
        """Whether a run that is asked to stop still makes this rollout, so that a resumed one learns from the same
        samples."""
        return self.generated_ahead is not None and rollout_id == self._end_at

    def _guarded(
        self, method: Callable[..., Awaitable[dict[str, Any]]]
    ) -> Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]:
        """`method` as a handler of the queue: an error in it is recorded as ours before the trainer hears of it."""

        @functools.wraps(method)
        async def handle(params: dict[str, Any]) -> dict[str, Any]:
            try:
                return await method(**params)
            except Exception as error:
                self._failed(error)
                raise as_hpcrl_error(error) from error

        return handle
