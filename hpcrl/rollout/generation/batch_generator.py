"""How a rollout is made, on one page: issue groups, judge what is finished, stop when the batch is full, keep the
rest or drop it.

Invariant: without over-sampling, filter and partial rollout this is: take --rollout-batch-size groups, make their
samples.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.rollout.batch_assembly import Rollout
from hpcrl.rollout.filters.custom_filters import DynamicFilter
from hpcrl.rollout.filters.verdict import Verdict
from hpcrl.rollout.generation.batch_policies import BatchSelection
from hpcrl.rollout.generation.group_store import GroupStore
from hpcrl.rollout.generation.in_flight import InFlightGroups
from hpcrl.rollout.ledger.group_progress import GroupProgress, mask_older
from hpcrl.rollout.ledger.journal import HandedOver
from hpcrl.rollout.samplers.sampler import Sampler
from hpcrl.sample import Sample

SURPLUS = "surplus"  #: the reason of groups that a full batch did not need


class GeneratedRollout(NamedTuple):
    """A batch, and what is known of how it was made.

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


async def judge(dynamic: DynamicFilter | None, store: GroupStore, rollout_id: int, progress: GroupProgress) -> Verdict:
    """What the filter, if any, says of a finished group; a good group is on disk when this returns."""
    found = Verdict(True)
    if dynamic is not None:
        found = await dynamic.judge(rollout_id, progress.number, progress.samples())
    if found.keep:
        await store.write(progress)
    return found


def assemble(rollout_id: int, version: int, batch: Sequence[GroupProgress], each: int) -> Rollout:
    """The rollout of a batch whose groups are finished.

    version: of the policy that the rollout is for; each: responses to a prompt.
    """
    found = Rollout(rollout_id, version, [progress.group for progress in batch], each)
    for progress in batch:
        for samples in progress.finished.values():
            found.add(samples)
    return found


class BatchGenerator:
    """Makes one rollout after another.  abort: ends every sample in flight at the engines; what is there of them is
    returned."""

    def __init__(
        self, options: Options, store: GroupStore, sampler: Sampler, abort: Callable[[], Awaitable[None]]
    ) -> None:
        self._options = options
        self._store = store
        self._sampler = sampler
        self._abort = abort
        replayed = options.load_debug_rollout_data is not None  # whole batches, which were chosen when they were made
        self._filter = DynamicFilter(options) if options.dynamic_sampling_filter_path and not replayed else None
        self._at_once = (
            options.rollout_batch_size if replayed else options.over_sampling_batch_size or options.rollout_batch_size
        )
        self._selection: BatchSelection | None = None
        self._refused: dict[str, int] = {}
        self._verdicts: dict[int, Verdict] = {}  # of groups that are finished and not yet looked at

    async def make(self, rollout_id: int, version: int, consumed: int | None = None) -> GeneratedRollout:
        """The samples of `rollout_id` under policy `version`, for a trainer that is at `consumed` when it learns from
        them."""
        o, store = self._options, self._store
        selection = self._selection = BatchSelection(o.rollout_batch_size, self._at_once, o.deterministic_mode)
        running = InFlightGroups(
            self._sampler,
            rollout_id,
            version,
            o.n_samples_per_prompt,
            needs(o).greedy,
            partial(self._judge, rollout_id),
        )
        groups: dict[int, GroupProgress] = {}  # finished, and perhaps in the batch
        self._refused = {}
        self._verdicts = {}
        continued = 0
        issued = 0
        try:
            while not selection.full:
                if count := selection.due():
                    finished, unfinished = await store.take(count, rollout_id, version, consumed)
                    selection.add(progress.number for progress in (*finished, *unfinished))
                    issued = issued + len(unfinished)
                    continued = continued + sum(not progress.empty for progress in unfinished)
                    for progress in finished:
                        groups[progress.number] = progress
                        selection.keep(progress.number)
                    for progress in unfinished:
                        running.start(progress)
                    continue
                progress = await running.next()
                groups[progress.number] = progress
                self._place(progress, selection)
            await self._settle(rollout_id, running, selection, groups)
        finally:
            await running.close()
        batch = [groups[number] for number in selection.outcome().batch]
        line = store.hand_over(rollout_id, batch)
        found = {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in self._refused.items()}
        if o.leaves_groups_over:
            found |= {"rollout/groups_issued": float(issued)}
        if o.partial_rollout:
            found |= {"rollout/groups_continued": float(continued)}
        return GeneratedRollout(self._rollout(rollout_id, version, batch), found, self._dropped(groups), line)

    def _dropped(self, groups: dict[int, GroupProgress]) -> list[Sample]:
        ledger = self._store.ledger
        return [
            sample for number, progress in groups.items() if number not in ledger.bank for sample in progress.samples()
        ]

    def __str__(self) -> str:
        """What the batch lacks, for an error."""
        if self._selection is None:
            return "nothing was asked for yet"
        refused = ", ".join(f"{count} refused for {reason}" for reason, count in self._refused.items())
        missing = f"{self._selection.missing} of {self._selection.wanted} groups"
        return f"{missing} ({refused})" if refused else missing

    async def _judge(self, rollout_id: int, progress: GroupProgress) -> None:
        self._verdicts[progress.number] = await judge(self._filter, self._store, rollout_id, progress)

    def _place(self, progress: GroupProgress, selection: BatchSelection) -> None:
        """Keep a judged group, or refuse it."""
        found = self._verdicts.pop(progress.number)
        if found.keep:
            self._store.finish(progress)
            selection.keep(progress.number)
        else:
            selection.refuse(progress.number, found.reason, found.keep_when_insufficient)
            self._refused[found.reason] = self._refused.get(found.reason, 0) + 1

    async def _settle(
        self, rollout_id: int, running: InFlightGroups, selection: BatchSelection, groups: dict[int, GroupProgress]
    ) -> None:
        """The batch is full: end what is in flight, keep it and what is good beyond need, or drop both."""
        o, store = self._options, self._store
        left: list[GroupProgress] = []
        if o.partial_rollout:
            for progress in await running.stop(self._abort):
                if progress.complete(o.n_samples_per_prompt, needs(o).greedy):  # just before it was told to end
                    groups[progress.number] = progress
                    if progress.number not in self._verdicts:
                        await self._judge(rollout_id, progress)
                    self._place(progress, selection)
                else:
                    left.append(progress)
        else:
            left = await running.stop(None)  # whoever is cancelled ends its own request
        outcome = selection.outcome()
        self._refused = {}
        for number, reason in outcome.refused.items():
            store.drop([groups[number]], reason)
            self._refused[reason] = self._refused.get(reason, 0) + 1
        for number in outcome.batch:  # refused ones that are taken because there were too few
            if number in store.ledger.in_flight:
                await store.write(groups[number])
                store.finish(groups[number])
        left += [groups[number] for number in outcome.surplus]
        if o.partial_rollout:
            await store.put_back(left)
        else:
            store.drop(left, SURPLUS)

    def _rollout(self, rollout_id: int, version: int, batch: list[GroupProgress]) -> Rollout:
        if self._options.mask_offpolicy_in_partial_rollout:
            batch = [
                replace(
                    progress,
                    finished={index: mask_older(samples, version) for index, samples in progress.finished.items()},
                )
                for progress in batch
            ]
        return assemble(rollout_id, version, batch, self._options.n_samples_per_prompt)
