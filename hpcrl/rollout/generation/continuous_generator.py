"""Rollouts in --loop fully-async: groups are in flight all the time, and a batch leaves when the trainer asks for one.

    issue what staleness and engines allow -> judge what is finished -> hand over the oldest finished, when asked

`StalenessControl` says how many groups to issue and which are a batch, `ConcurrencyLimit` how many the engines can
take.

Invariants: every group is in its place of the ledger at any moment; where everything stands is written down in the same
turn as the batch is handed over, so that a checkpoint after it loses no group and knows of none twice; nothing is at
work after `close`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.errors import HpcrlError
from hpcrl.rollout.async_tasks import as_hpcrl_error, cancel
from hpcrl.rollout.engines.concurrency_limit import ConcurrencyLimit, EngineMetrics
from hpcrl.rollout.filters.custom_filters import DynamicFilter
from hpcrl.rollout.filters.verdict import Verdict
from hpcrl.rollout.generation.batch_generator import GeneratedRollout, assemble, judge
from hpcrl.rollout.generation.batch_policies import StalenessControl
from hpcrl.rollout.generation.group_store import GroupStore
from hpcrl.rollout.generation.in_flight import InFlightGroups
from hpcrl.rollout.ledger.group_progress import GroupProgress
from hpcrl.rollout.samplers.sampler import Sampler
from hpcrl.sample import Sample

#: the reason of groups that --stale-samples drop gives up, and the count of those that `train` trains on
STALE = "stale"
LOOK = 1.0  #: seconds between two looks at the engines' own metrics


@dataclass(eq=False)
class BatchRequest:
    """A rollout that is asked for, and the trainer's version when it learns from it."""

    rollout_id: int
    consumed: int
    made: asyncio.Future[GeneratedRollout]


class ContinuousGenerator:
    """Makes one rollout after another out of groups that are always in flight.

    abort: aborts every sample in flight at the engines; their tokens so far are returned.
    look: the engines' own metrics.
    total: rollouts of the run.
    """

    def __init__(
        self,
        options: Options,
        store: GroupStore,
        sampler: Sampler,
        abort: Callable[[], Awaitable[None]],
        look: Callable[[], Awaitable[Sequence[EngineMetrics]]],
        total: int,
    ) -> None:
        self._options = options
        self._store = store
        self._sampler = sampler
        self._abort = abort
        self._look = look
        self._total = total
        self._filter = DynamicFilter(options) if options.dynamic_sampling_filter_path else None
        steps = options.steps_per_rollout
        self._staleness = StalenessControl(
            options.rollout_batch_size, options.staleness_limit, steps, options.stale_samples
        )
        self._concurrency = ConcurrencyLimit(options.n_samples_per_prompt)
        self._running: InFlightGroups | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._request: BatchRequest | None = None
        self._next = 0  # the rollout that leaves next
        self._trainer_waits = True  # whether the trainer waits
        self._working: dict[int, GroupProgress] = {}
        self._finished: dict[int, GroupProgress] = {}
        self._verdicts: dict[int, Verdict] = {}
        self._dropped: list[Sample] = []
        self._counts: dict[str, int] = {}  # since the last batch: groups that were dropped, by reason; "remade"
        self._idle = 0.0
        self._idle_since = time.monotonic()

    def __str__(self) -> str:
        """What the batch lacks, for an error."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in self._counts.items())
        there = f"{len(self._finished)} of {self._options.rollout_batch_size} groups, {len(self._working)} at work"
        return f"the batch ({there}; {dropped})" if dropped else f"the batch ({there})"

    # ---- what the trainer's calls mean here

    def publish(self, version: int) -> None:
        """The engines have the weights of policy `version`."""
        self._staleness.publish(version)
        self._wake.set()

    def trainer_is_waiting(self) -> None:
        """The trainer has nothing to do until the next batch."""
        self._trainer_waits = True
        self._wake.set()

    async def make(self, rollout_id: int, version: int, consumed: int | None = None) -> GeneratedRollout:
        """The next batch, for a trainer at policy `consumed`; samples of it have tokens of several policies, `version`
        at most."""
        request = BatchRequest(
            rollout_id, version if consumed is None else consumed, asyncio.get_running_loop().create_future()
        )
        self._next = rollout_id
        self._request = request
        self._staleness.following = request.consumed
        self.publish(version)
        if self._running is None:
            o = self._options
            self._idle_since = time.monotonic()
            self._running = InFlightGroups(
                self._sampler, rollout_id, version, o.n_samples_per_prompt, needs(o).greedy, self._judge
            )
            self._tasks = [asyncio.create_task(self._work(self._running)), asyncio.create_task(self._follow_metrics())]
        try:
            await asyncio.wait([request.made, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done() and not request.made.done():
                    raise as_hpcrl_error(task.exception() or HpcrlError("the making of rollouts has ended")) from None
            return request.made.result()
        finally:
            self._request = None

    async def stop(self) -> None:
        """End what is at work, and keep what there is of it for a run that resumes."""
        await cancel(*self._tasks)
        if self._running is None:
            return
        left = []
        for progress in await self._running.stop(self._abort):
            if progress.number in self._working:
                left.append(self._working.pop(progress.number))
        await self._store.put_back(left)

    async def close(self) -> None:
        """Cancel whatever is at work."""
        await cancel(*self._tasks)
        if self._running is not None:
            await self._running.close()

    # ---- at work

    async def _work(self, running: InFlightGroups) -> None:
        finishing = asyncio.create_task(running.next())
        try:
            while True:
                self._wake.clear()
                await self._issue(running)
                self._hand_over(running)
                waking = asyncio.create_task(self._wake.wait())
                try:
                    await asyncio.wait([finishing, waking], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waking.cancel()
                if finishing.done():
                    self._place(finishing.result())
                    finishing = asyncio.create_task(running.next())
        finally:
            finishing.cancel()

    async def _follow_metrics(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            self._concurrency.read(await self._look(), self._in_flight())
            self._wake.set()

    def _in_flight(self) -> int:
        """Samples that are not finished."""
        return sum(self._options.n_samples_per_prompt - len(progress.finished) for progress in self._working.values())

    async def _issue(self, running: InFlightGroups) -> None:
        """Start as many groups as staleness, the engines and the rest of the run allow."""
        needed = (self._total - self._next) * self._options.rollout_batch_size - self._staleness.outstanding
        count = min(self._staleness.due(), needed)
        if count > 0 and self._concurrency.limit is not None:
            count = self._concurrency.room(self._in_flight(), count)
        if count <= 0:
            return
        version = self._staleness.engines
        running.turn(self._next, version)
        finished, unfinished = await self._store.take(count, self._next, version, self._staleness.following)
        for progress in finished:
            self._store.ledger.release(progress.number)
        if not self._working:
            self._idle += time.monotonic() - self._idle_since
            self._idle_since = time.monotonic()
        for progress in [*finished, *unfinished]:
            self._start(running, progress)

    def _start(self, running: InFlightGroups, progress: GroupProgress) -> None:
        """Go on with what there is of a group, if that can be in time; else begin it again."""
        span = progress.versions()
        done = progress.number in self._store.ledger.bank
        if span is not None and not self._staleness.resume(progress.number, span[0]):
            if done:
                self._store.ledger.reopen(progress.number)
                self._store.ledger.resume(progress.number)
            progress = GroupProgress(progress.group)
            span, done = None, False
            self._count("remade")
        if span is None:
            self._staleness.issue([progress.number])
        if done:
            self._finished[progress.number] = progress
            self._staleness.finish(progress.number)
        else:
            self._working[progress.number] = progress
            running.start(progress)

    async def _judge(self, progress: GroupProgress) -> None:
        self._verdicts[progress.number] = await judge(self._filter, self._store, self._next, progress)

    def _place(self, progress: GroupProgress) -> None:
        """Keep a finished group, or refuse it."""
        found = self._verdicts.pop(progress.number, None)
        if self._working.pop(progress.number, None) is None or found is None:  # given up in this very turn
            return
        if found.keep:
            self._store.finish(progress)
            self._store.ledger.release(progress.number)  # for whichever batch it comes to
            self._finished[progress.number] = progress
            self._staleness.finish(progress.number)
        else:
            self._give_up(progress, found.reason)
        if not self._working:
            self._idle_since = time.monotonic()

    def _give_up(self, progress: GroupProgress, reason: str) -> None:
        self._staleness.leave(progress.number)
        self._store.drop([progress], reason)
        self._dropped += progress.samples()
        self._count(reason)

    def _count(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1

    def _hand_over(self, running: InFlightGroups) -> None:
        """The batch that is asked for, if it is full."""
        request = self._request
        if request is None or request.made.done() or (batch := self._staleness.batch()) is None:
            return
        if batch.late and not self._trainer_waits:
            return  # there is time yet
        for number in batch.late:
            running.end(number)
            self._verdicts.pop(number, None)
            self._give_up(self._working.pop(number), STALE)
        groups = [self._finished.pop(number) for number in sorted(batch.groups)]
        oldest = request.consumed - self._options.staleness_limit
        for progress in groups:
            self._staleness.leave(progress.number)
            self._store.ledger.claim(progress.number, request.rollout_id)
            if (span := progress.versions()) is not None and span[
                0
            ] < oldest:  # only where that is wanted: --stale-samples train
                self._count(STALE)
        self._staleness.took(request.consumed)
        self._store.consumed(request.rollout_id, request.consumed)
        line = self._store.hand_over(request.rollout_id, groups)
        rollout = assemble(request.rollout_id, request.consumed, groups, self._options.n_samples_per_prompt)
        dropped = self._dropped
        self._dropped = []
        state = self._store.state(request.rollout_id)
        request.made.set_result(GeneratedRollout(rollout, self._metrics(), dropped, line, state))
        self._next = request.rollout_id + 1
        self._trainer_waits = False
        self._wake.set()  # there is room for more

    def _metrics(self) -> dict[str, float]:
        idle = self._idle + (0.0 if self._working else time.monotonic() - self._idle_since)
        self._idle = 0.0
        self._idle_since = time.monotonic()
        counts = self._counts
        self._counts = {}
        found = {
            "rollout/groups_waiting": float(len(self._finished)),
            "rollout/groups_stale": float(counts.pop(STALE, 0)),
            "rollout/groups_remade": float(counts.pop("remade", 0)),
            "perf/rollout_wait_time": idle,
        }
        if self._concurrency.limit is not None:
            found["rollout/requests_limit"] = float(self._concurrency.limit)
        return found | {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in counts.items()}
