"""The making of a rollout, on one page: issue groups, judge what is finished, stop when the batch is full, keep the
rest or drop it.

Invariant: without over-sampling, filter and partial rollout this is: take --rollout-batch-size groups, make their
samples.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.rollout.batch_assembly import Rollout
from hpcrl.rollout.filters.own import DynamicFilter
from hpcrl.rollout.filters.verdict import Verdict
from hpcrl.rollout.ledger.account import HandedOver
from hpcrl.rollout.ledger.held import Held, mask_older
from hpcrl.rollout.making.crew import Crew
from hpcrl.rollout.making.filling import Filling
from hpcrl.rollout.making.shelf import Shelf
from hpcrl.rollout.samplers.sampler import Sampler
from hpcrl.sample import Sample

SURPLUS = "surplus"  #: the reason of groups that a full batch did not need


class Made(NamedTuple):
    """rollout: the batch; metrics: what to log of its making; dropped: samples of finished groups that are not in it,
    and never will be;
    line: what the ledger wrote down of it; state: where everything stands once it is trained, if that was to be said at
    once."""

    rollout: Rollout
    metrics: dict[str, float]
    dropped: list[Sample]
    line: HandedOver
    state: dict[str, Any] | None = None


class Maker:
    """Makes one rollout after another.  abort: ends every sample in flight at the engines; what is there of them is
    returned."""

    def __init__(self, options: Options, shelf: Shelf, sampler: Sampler, abort: Callable[[], Awaitable[None]]) -> None:
        self._options = options
        self._shelf = shelf
        self._sampler = sampler
        self._abort = abort
        replayed = options.load_debug_rollout_data is not None  # whole batches, which were chosen when they were made
        self._filter = DynamicFilter(options) if options.dynamic_sampling_filter_path and not replayed else None
        self._at_once = (
            options.rollout_batch_size if replayed else options.over_sampling_batch_size or options.rollout_batch_size
        )
        self._filling: Filling | None = None
        self._refused: dict[str, int] = {}
        self._verdicts: dict[int, Verdict] = {}  # of groups that are finished and not yet looked at

    async def make(self, rollout_id: int, version: int, consumed: int | None = None) -> Made:
        """The samples of `rollout_id` under policy `version`, for a trainer that is at `consumed` when it learns from
        them."""
        o, shelf = self._options, self._shelf
        filling = self._filling = Filling(o.rollout_batch_size, self._at_once, o.deterministic_mode)
        crew = Crew(
            self._sampler,
            rollout_id,
            version,
            o.n_samples_per_prompt,
            needs(o).greedy,
            partial(self._judge, rollout_id),
        )
        groups: dict[int, Held] = {}  # finished, and perhaps in the batch
        self._refused = {}
        self._verdicts = {}
        continued = 0
        issued = 0
        try:
            while not filling.full:
                if count := filling.due():
                    finished, unfinished = await shelf.take(count, rollout_id, version, consumed)
                    filling.add(held.number for held in (*finished, *unfinished))
                    issued = issued + len(unfinished)
                    continued = continued + sum(not held.empty for held in unfinished)
                    for held in finished:
                        groups[held.number] = held
                        filling.keep(held.number)
                    for held in unfinished:
                        crew.start(held)
                    continue
                held = await crew.next()
                groups[held.number] = held
                self._place(held, filling)
            await self._settle(rollout_id, crew, filling, groups)
        finally:
            await crew.close()
        batch = [groups[number] for number in filling.outcome().batch]
        line = shelf.hand_over(rollout_id, batch)
        found = {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in self._refused.items()}
        if o.leaves_groups_over:
            found |= {"rollout/groups_issued": float(issued)}
        if o.partial_rollout:
            found |= {"rollout/groups_continued": float(continued)}
        return Made(self._rollout(rollout_id, version, batch), found, self._dropped(groups), line)

    def _dropped(self, groups: dict[int, Held]) -> list[Sample]:
        ledger = self._shelf.ledger
        return [sample for number, held in groups.items() if number not in ledger.bank for sample in held.samples()]

    def __str__(self) -> str:
        """What the batch lacks, for an error."""
        if self._filling is None:
            return "nothing was asked for yet"
        refused = ", ".join(f"{count} refused for {reason}" for reason, count in self._refused.items())
        missing = f"{self._filling.missing} of {self._filling.wanted} groups"
        return f"{missing} ({refused})" if refused else missing

    async def _judge(self, rollout_id: int, held: Held) -> None:
        """What the filter says of a finished group; a good one is on disk then."""
        found = Verdict(True)
        if self._filter is not None:
            found = await self._filter.judge(rollout_id, held.number, held.samples())
        if found.keep:
            await self._shelf.write(held)
        self._verdicts[held.number] = found

    def _place(self, held: Held, filling: Filling) -> None:
        """Keep a judged group, or refuse it."""
        found = self._verdicts.pop(held.number)
        if found.keep:
            self._shelf.finish(held)
            filling.keep(held.number)
        else:
            filling.refuse(held.number, found.reason, found.keep_when_insufficient)
            self._refused[found.reason] = self._refused.get(found.reason, 0) + 1

    async def _settle(self, rollout_id: int, crew: Crew, filling: Filling, groups: dict[int, Held]) -> None:
        """The batch is full: end what is in flight, keep it and what is good beyond need, or drop both."""
        o, shelf = self._options, self._shelf
        left: list[Held] = []
        if o.partial_rollout:
            for held in await crew.stop(self._abort):
                if held.complete(o.n_samples_per_prompt, needs(o).greedy):  # just before it was told to end
                    groups[held.number] = held
                    if held.number not in self._verdicts:
                        await self._judge(rollout_id, held)
                    self._place(held, filling)
                else:
                    left.append(held)
        else:
            left = await crew.stop(None)  # whoever is cancelled ends its own request
        outcome = filling.outcome()
        self._refused = {}
        for number, reason in outcome.refused.items():
            shelf.drop([groups[number]], reason)
            self._refused[reason] = self._refused.get(reason, 0) + 1
        for number in outcome.batch:  # refused ones that are taken because there were too few
            if number in shelf.ledger.in_flight:
                await shelf.write(groups[number])
                shelf.finish(groups[number])
        left += [groups[number] for number in outcome.surplus]
        if o.partial_rollout:
            await shelf.put_back(left)
        else:
            shelf.drop(left, SURPLUS)

    def _rollout(self, rollout_id: int, version: int, batch: list[Held]) -> Rollout:
        found = Rollout(rollout_id, version, [held.group for held in batch], self._options.n_samples_per_prompt)
        for held in batch:
            for samples in held.finished.values():
                masked = mask_older(samples, version) if self._options.mask_offpolicy_in_partial_rollout else samples
                found.add(masked)
        return found
