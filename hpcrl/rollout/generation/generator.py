"""How a rollout is made, on one page: issue groups, judge what is finished, hand over a batch once there is one.

    issue what the policy and the engines allow -> judge what is finished -> hand over, when asked

`batch_policies.py` decides.  With `BatchSelection` a rollout is begun when it is asked for, and what is at work when
its batch is full is dropped, or kept for the next one.  With `StalenessControl` (--loop fully-async) groups are in
flight all the time, and `ConcurrencyLimit` says how many of them the engines can take.

Invariants: a group is in its place of the ledger at any moment, and what there is of it in the store alone; without
over-sampling, filter and partial rollout a rollout is the next --rollout-batch-size groups of which enough responses
were graded; where groups are in flight all the time, the state is taken in the same turn as the batch is handed over,
so that a checkpoint after it loses no group and knows of none twice; nothing is at work after `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.errors import HpcrlError
from hpcrl.rollout.async_tasks import as_hpcrl_error, cancel
from hpcrl.rollout.batch_assembly import Rollout
from hpcrl.rollout.engines.load import ConcurrencyLimit, EngineMetrics
from hpcrl.rollout.filters.custom_filters import DynamicFilter
from hpcrl.rollout.filters.verdict import Verdict
from hpcrl.rollout.generation.batch_policies import BatchSelection, NextBatch, StalenessControl
from hpcrl.rollout.generation.group_store import GroupStore
from hpcrl.rollout.generation.in_flight import InFlightGroups
from hpcrl.rollout.ledger.group_progress import GroupProgress
from hpcrl.rollout.ledger.ledger import HandedOver
from hpcrl.rollout.samplers.sampler import Sampler
from hpcrl.sample import Sample

SURPLUS = "surplus"  #: the reason of groups that a full batch did not need
UNGRADED = "too_few_graded"  #: of those with fewer than two responses that count
LOOK = 1.0  #: seconds between two looks at the engines' own metrics


class GeneratedRollout(NamedTuple):
    """A batch, and what is known of how it was made.

    Attributes:
        metrics: to be logged.
        dropped: samples of finished groups that are not in it, and never will be.
        line: what the ledger wrote down of it.
        state: where everything stands once it is trained, if that has to be known at once.
    """

    rollout: Rollout
    metrics: dict[str, float]
    dropped: list[Sample]
    line: HandedOver
    state: dict[str, Any] | None = None


class RolloutGenerator:
    """Makes one rollout after another.

    Attributes:
        abort: aborts every sample in flight at the engines; their tokens so far are returned.
        look: the engines' own metrics; None: what they say limits nothing.
        total: rollouts of the run.
    """

    def __init__(
        self,
        options: Options,
        store: GroupStore,
        sampler: Sampler,
        abort: Callable[[], Awaitable[None]],
        look: Callable[[], Awaitable[Sequence[EngineMetrics]]] | None = None,
        total: int = 0,
    ) -> None:
        self._options = options
        self._store = store
        self._abort = abort
        self._look = look
        self._total = total
        self._judges = options.load_debug_rollout_data is None  # else whole batches, chosen when they were made
        self._filter = DynamicFilter(options) if options.dynamic_sampling_filter_path and self._judges else None
        self._policy = self._new_policy()
        self._concurrency = ConcurrencyLimit(options.n_samples_per_prompt)
        self._wake = asyncio.Event()
        self._running = InFlightGroups(
            sampler, options.n_samples_per_prompt, needs(options).greedy, self._judge, self._wake.set
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._made: asyncio.Future[GeneratedRollout] | None = None  # the rollout that is asked for
        self._next = 0  # the rollout that leaves next
        self._version = 0  # the policy version of the engines
        self._consumed = 0  # that of the trainer as it learns from the next rollout
        self._dropped: list[Sample] = []
        self._counts: dict[str, int] = {}  # since the last batch

    def _new_policy(self) -> BatchSelection | StalenessControl:
        o = self._options
        wanted = o.rollout_batch_size
        if o.never_waits:
            return StalenessControl(wanted, o.staleness_limit, o.steps_per_rollout)
        at_once = o.over_sampling_batch_size or (wanted if self._filter else 0)
        return BatchSelection(wanted, at_once if self._judges else 0, o.deterministic_mode)

    def __str__(self) -> str:
        """What the batch lacks, for an error."""
        reasons = list(self._policy.refused.values())
        refused = ", ".join(f"{reasons.count(reason)} refused for {reason}" for reason in dict.fromkeys(reasons))
        missing = f"{self._policy.missing} of {self._policy.wanted} groups"
        return f"{missing} ({refused})" if refused else missing

    @property
    def continuous(self) -> bool:
        """Whether it never stops making."""
        return self._policy.continuous

    # ---- what the trainer's calls mean here

    def publish(self, version: int) -> None:
        """The engines have the weights of policy `version`."""
        if self.continuous:
            self._version = max(self._version, version)
            self._policy.publish(version)
            self._wake.set()

    def trainer_is_waiting(self) -> None:
        """The trainer has nothing to do until the next batch."""
        self._wake.set()

    async def make(self, rollout_id: int, version: int, consumed: int | None = None) -> GeneratedRollout:
        """The samples of `rollout_id` under policy `version` (a continuous one: at most), for a trainer that is at
        `consumed` when it learns from them."""
        self._consumed = version if consumed is None else consumed
        made = self._made = asyncio.get_running_loop().create_future()
        self._next = rollout_id
        if not self._tasks:
            self._policy = self._new_policy()
            self._version = version
            self._dropped = []
            self._counts = {}
            self._running.idle_time()  # from now on
            self._tasks = [asyncio.create_task(self._work())]
            if self._look is not None:
                self._tasks.append(asyncio.create_task(self._follow_metrics(self._look)))
        self._policy.request_batch(self._consumed, self._total - rollout_id - 1)
        self.publish(version)
        self._wake.set()
        try:
            await asyncio.wait([made, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done() and not made.done():
                    raise as_hpcrl_error(task.exception() or HpcrlError("the generator is closed")) from None
            return made.result()
        finally:
            self._made = None
            if not self.continuous:
                await self.close()

    async def stop(self) -> None:
        """End what is always at work, and keep what there is of it for a run that resumes."""
        if self.continuous:
            await cancel(*self._tasks)
            await self._store.put_back(await self._end_running(keep=True))

    async def close(self) -> None:
        """Cancel whatever is at work."""
        await cancel(*self._tasks)
        self._tasks = []
        await self._running.close()

    # ---- at work

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            await self._issue()
            made = self._made
            if made is not None and not made.done() and (batch := self._policy.batch()) is not None:
                if not self.continuous:
                    batch = await self._settle()
                made.set_result(self._hand_over(batch))
                if not self.continuous:
                    return
            elif (finished := self._running.pop()) is not None:
                self._place(*finished)
            else:
                await self._wake.wait()

    async def _follow_metrics(self, look: Callable[[], Awaitable[Sequence[EngineMetrics]]]) -> None:
        while True:
            await asyncio.sleep(LOOK)
            self._concurrency.read(await look(), self._running.responses)
            self._wake.set()

    async def _issue(self) -> None:
        """Start as many groups as the policy and the engines allow."""
        while (count := self._policy.due()) > 0:
            if (count := self._concurrency.room(self._running.responses, count)) <= 0:
                return
            for progress in await self._store.next_groups(count, self._next, self._version, self._consumed):
                self._start(progress)

    def _start(self, progress: GroupProgress) -> None:
        """Continue with what there is of a group, if that can be in time; else begin it again."""
        number = progress.number
        span = progress.versions()
        if not self._policy.issue(number, span and span[0]):
            progress = self._store.begin_again(number)
            self._policy.issue(number)
            self._count("remade")
        if number in self._store.ledger.bank:
            self._policy.keep(number)
            return
        self._count("issued")
        if not progress.empty:
            self._count("continued")
        self._running.start(progress, self._next, self._version)

    async def _judge(self, progress: GroupProgress) -> Verdict:
        """Whether a finished group counts, and what the filter, if any, says of it; a good one is on disk when this
        returns."""
        found = Verdict(True)
        if self._judges and not progress.counts(self._options.n_samples_per_prompt):
            found = Verdict(False, UNGRADED)
        elif self._filter is not None:
            found = await self._filter.judge(self._next, progress.number, progress.graded())
        if found.keep:
            await self._store.write(progress)
        return found

    def _place(self, progress: GroupProgress, verdict: Verdict) -> None:
        """Keep a judged group, or refuse it."""
        if verdict.keep:
            self._store.ledger.finish(progress.number)
            self._policy.keep(progress.number)
        else:
            self._policy.refuse(progress.number, verdict.reason, verdict.keep_when_insufficient)

    # ---- a batch

    async def _settle(self) -> NextBatch:
        """The batch is full: end what is in flight, keep it and what is good beyond need, or drop both."""
        store = self._store
        partial = self._options.partial_rollout
        left = await self._end_running(keep=partial)
        batch = self._policy.batch()
        assert batch is not None
        for number in batch.groups:  # refused ones that are taken because there were too few
            if number in store.ledger.in_flight:
                await store.write(store.groups[number])
                store.ledger.finish(number)
        if partial:
            await store.put_back([*left, *batch.surplus])
        else:
            self._dropped += [sample for number in batch.surplus for sample in store.groups[number].samples()]
            store.drop([*left, *batch.surplus], SURPLUS)
        return batch

    async def _end_running(self, keep: bool) -> list[int]:
        """End what is in flight; the groups that are not finished.

        Args:
            keep: have the engines return what they have, and place what is finished meanwhile; else a task that is
                cancelled ends its own request.
        """
        left = []
        for progress, verdict in await self._running.stop(self._abort if keep else None):
            if keep and self._running.complete(progress):  # just before it was told to end
                self._place(progress, verdict or await self._judge(progress))
            else:
                left.append(progress.number)
        return left

    def _hand_over(self, batch: NextBatch) -> GeneratedRollout:
        rollout_id, consumed = self._next, self._consumed
        for number, reason in batch.dropped.items():
            self._dropped += self._store.groups[number].samples()
            self._store.drop([number], reason)
            self._count(f"drop_{reason}")
        self._policy.took(batch)
        version = consumed if self.continuous else self._version
        rollout, line = self._store.hand_over(rollout_id, batch.groups, version, consumed)
        state = self._store.state(rollout_id) if self.continuous else None
        found = GeneratedRollout(rollout, self._metrics(), self._dropped, line, state)
        self._dropped = []
        self._counts = {}
        self._next = rollout_id + 1
        self._consumed = consumed + self._options.steps_per_rollout
        return found

    def _count(self, what: str, by: int = 1) -> None:
        self._counts[what] = self._counts.get(what, 0) + by

    def _metrics(self) -> dict[str, float]:
        def count(what: str) -> float:
            return float(self._counts.get(what, 0))

        found = {
            f"rollout/dynamic_filter/{what}": float(by) for what, by in self._counts.items() if what[:5] == "drop_"
        }
        if self.continuous:
            found["rollout/groups_waiting"] = float(len(self._store.held) - len(self._running))
            found["rollout/groups_remade"] = count("remade")
            found["perf/rollout_wait_time"] = self._running.idle_time()
            if self._concurrency.limit is not None:
                found["rollout/requests_limit"] = float(self._concurrency.limit)
            return found
        if self._options.leaves_groups_over:
            found["rollout/groups_issued"] = count("issued")
        if self._options.partial_rollout:
            found["rollout/groups_continued"] = count("continued")
        return found
