"""The making of rollouts in --loop fully-async: groups are at work all the time, and a batch leaves when the trainer
asks for one.

    issue what staleness and engines allow -> judge what is finished -> hand over the oldest finished, when asked

`pacing.py` says how many groups to issue and which are a batch, `engines/steering.py` how many the engines can take.

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
from hpcrl.rollout.batch_assembly import Rollout
from hpcrl.rollout.engines.concurrency_limit import Reading, Steering
from hpcrl.rollout.filters.own import DynamicFilter
from hpcrl.rollout.filters.verdict import Verdict
from hpcrl.rollout.ledger.held import Held
from hpcrl.rollout.making.crew import Crew
from hpcrl.rollout.making.maker import Made
from hpcrl.rollout.making.pacing import Pacing
from hpcrl.rollout.making.shelf import Shelf
from hpcrl.rollout.samplers.sampler import Sampler
from hpcrl.sample import Sample

STALE = (
    "stale"  #: the reason of groups that --stale-samples drop gives up, and the count of those that `train` trains on
)
LOOK = 1.0  #: seconds between two looks at the engines' own metrics


@dataclass(eq=False)
class Wish:
    """A rollout that is asked for, and the trainer's version when it learns from it."""

    rollout_id: int
    consumed: int
    made: asyncio.Future[Made]


class Stream:
    """Makes one rollout after another out of what is always at work.

    abort: ends every sample in flight at the engines, what is there of them is returned; look: what the engines say of
    themselves;
    total: rollouts of the run.
    """

    def __init__(
        self,
        options: Options,
        shelf: Shelf,
        sampler: Sampler,
        abort: Callable[[], Awaitable[None]],
        look: Callable[[], Awaitable[Sequence[Reading]]],
        total: int,
    ) -> None:
        self._options = options
        self._shelf = shelf
        self._sampler = sampler
        self._abort = abort
        self._look = look
        self._total = total
        self._filter = DynamicFilter(options) if options.dynamic_sampling_filter_path else None
        steps = options.steps_per_rollout
        self._pacing = Pacing(options.rollout_batch_size, options.staleness_limit, steps, options.stale_samples)
        self._steering = Steering(options.n_samples_per_prompt)
        self._crew: Crew | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._wake = asyncio.Event()
        self._wish: Wish | None = None
        self._next = 0  # the rollout that leaves next
        self._pressed = True  # whether the trainer waits
        self._working: dict[int, Held] = {}
        self._finished: dict[int, Held] = {}
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
        self._pacing.publish(version)
        self._wake.set()

    def press(self) -> None:
        """The trainer has nothing to do until the next batch."""
        self._pressed = True
        self._wake.set()

    async def make(self, rollout_id: int, version: int, consumed: int | None = None) -> Made:
        """The next batch, for a trainer at policy `consumed`; samples of it have tokens of several policies, `version`
        at most."""
        wish = Wish(rollout_id, version if consumed is None else consumed, asyncio.get_running_loop().create_future())
        self._next = rollout_id
        self._wish = wish
        self._pacing.following = wish.consumed
        self.publish(version)
        if self._crew is None:
            o = self._options
            self._idle_since = time.monotonic()
            self._crew = Crew(self._sampler, rollout_id, version, o.n_samples_per_prompt, needs(o).greedy, self._judge)
            self._tasks = [asyncio.create_task(self._work(self._crew)), asyncio.create_task(self._steer())]
        try:
            await asyncio.wait([wish.made, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done() and not wish.made.done():
                    raise as_hpcrl_error(task.exception() or HpcrlError("the making of rollouts has ended")) from None
            return wish.made.result()
        finally:
            self._wish = None

    async def stop(self) -> None:
        """End what is at work, and keep what there is of it for a run that goes on."""
        await cancel(*self._tasks)
        if self._crew is None:
            return
        left = []
        for held in await self._crew.stop(self._abort):
            if held.number in self._working:
                left.append(self._working.pop(held.number))
        await self._shelf.put_back(left)

    async def close(self) -> None:
        """Cancel whatever is at work."""
        await cancel(*self._tasks)
        if self._crew is not None:
            await self._crew.close()

    # ---- at work

    async def _work(self, crew: Crew) -> None:
        finishing = asyncio.create_task(crew.next())
        try:
            while True:
                self._wake.clear()
                await self._issue(crew)
                self._hand_over(crew)
                waking = asyncio.create_task(self._wake.wait())
                try:
                    await asyncio.wait([finishing, waking], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waking.cancel()
                if finishing.done():
                    self._place(finishing.result())
                    finishing = asyncio.create_task(crew.next())
        finally:
            finishing.cancel()

    async def _steer(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            self._steering.read(await self._look(), self._in_flight())
            self._wake.set()

    def _in_flight(self) -> int:
        """Samples that are not finished."""
        return sum(self._options.n_samples_per_prompt - len(held.finished) for held in self._working.values())

    async def _issue(self, crew: Crew) -> None:
        """Start as many groups as staleness, the engines and the rest of the run allow."""
        needed = (self._total - self._next) * self._options.rollout_batch_size - self._pacing.outstanding
        count = min(self._pacing.due(), needed)
        if count > 0 and self._steering.limit is not None:
            count = self._steering.room(self._in_flight(), count)
        if count <= 0:
            return
        version = self._pacing.engines
        crew.turn(self._next, version)
        finished, unfinished = await self._shelf.take(count, self._next, version, self._pacing.following)
        for held in finished:
            self._shelf.ledger.release(held.number)
        if not self._working:
            self._idle += time.monotonic() - self._idle_since
            self._idle_since = time.monotonic()
        for held in [*finished, *unfinished]:
            self._start(crew, held)

    def _start(self, crew: Crew, held: Held) -> None:
        """Go on with what there is of a group, if that can be in time; else begin it again."""
        span = held.versions()
        done = held.number in self._shelf.ledger.bank
        if span is not None and not self._pacing.go_on(held.number, span[0]):
            if done:
                self._shelf.ledger.reopen(held.number)
                self._shelf.ledger.resume(held.number)
            held = Held(held.group)
            span, done = None, False
            self._count("remade")
        if span is None:
            self._pacing.issue([held.number])
        if done:
            self._finished[held.number] = held
            self._pacing.finish(held.number)
        else:
            self._working[held.number] = held
            crew.start(held)

    async def _judge(self, held: Held) -> None:
        """What the filter says of a finished group; a good one is on disk then."""
        found = Verdict(True)
        if self._filter is not None:
            found = await self._filter.judge(self._next, held.number, held.samples())
        if found.keep:
            await self._shelf.write(held)
        self._verdicts[held.number] = found

    def _place(self, held: Held) -> None:
        """Keep a finished group, or refuse it."""
        found = self._verdicts.pop(held.number, None)
        if self._working.pop(held.number, None) is None or found is None:  # given up in this very turn
            return
        if found.keep:
            self._shelf.finish(held)
            self._shelf.ledger.release(held.number)  # for whichever batch it comes to
            self._finished[held.number] = held
            self._pacing.finish(held.number)
        else:
            self._give_up(held, found.reason)
        if not self._working:
            self._idle_since = time.monotonic()

    def _give_up(self, held: Held, reason: str) -> None:
        self._pacing.leave(held.number)
        self._shelf.drop([held], reason)
        self._dropped += held.samples()
        self._count(reason)

    def _count(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1

    def _hand_over(self, crew: Crew) -> None:
        """The batch that is asked for, if it is full."""
        wish = self._wish
        if wish is None or wish.made.done() or (batch := self._pacing.batch()) is None:
            return
        if batch.late and not self._pressed:
            return  # there is time yet
        for number in batch.late:
            crew.end(number)
            self._verdicts.pop(number, None)
            self._give_up(self._working.pop(number), STALE)
        groups = [self._finished.pop(number) for number in sorted(batch.groups)]
        oldest = wish.consumed - self._options.staleness_limit
        for held in groups:
            self._pacing.leave(held.number)
            self._shelf.ledger.claim(held.number, wish.rollout_id)
            if (span := held.versions()) is not None and span[
                0
            ] < oldest:  # only where that is wanted: --stale-samples train
                self._count(STALE)
        self._pacing.took(wish.consumed)
        self._shelf.consumed(wish.rollout_id, wish.consumed)
        line = self._shelf.hand_over(wish.rollout_id, groups)
        rollout = Rollout(
            wish.rollout_id, wish.consumed, [held.group for held in groups], self._options.n_samples_per_prompt
        )
        for held in groups:
            for samples in held.finished.values():
                rollout.add(samples)
        dropped = self._dropped
        self._dropped = []
        state = self._shelf.state(wish.rollout_id)
        wish.made.set_result(Made(rollout, self._metrics(), dropped, line, state))
        self._next = wish.rollout_id + 1
        self._pressed = False
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
        if self._steering.limit is not None:
            found["rollout/requests_limit"] = float(self._steering.limit)
        return found | {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in counts.items()}
