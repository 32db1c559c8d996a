"""A rollout made by a function of the user's (--rollout-function-path), in place of `generator.py`.

    groups = await data_source.get_samples(4)          # of four prompts: samples that wait for their response
    done = await data_source.generate(groups[0][0])    # sampled by the engines, and graded: one sample, or several

Invariants: the function can lose or invent no group: what it returns is checked against what it was given, and groups
that it was given and did not return are dropped, with a reason; whatever it raises is one error that names the option.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrl.config.custom_functions import short
from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.rollout.custom_hooks import call_hook, check_samples, is_finished, read_metrics
from hpcrl.rollout.engines.completion import pending_sample
from hpcrl.rollout.generation.generator import GeneratedRollout
from hpcrl.rollout.generation.group_store import GroupStore
from hpcrl.rollout.ledger.group_progress import GroupProgress
from hpcrl.rollout.samplers.sampler import ResponseRequest, Sampler
from hpcrl.rollout.slime_names.arguments import Arguments
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import PENDING

UNUSED = "unused"  #: the reason of groups that the function was given and did not return


@dataclass
class RolloutSource:
    """What the function is given as data_source, for one rollout."""

    _options: Options
    _store: GroupStore
    _sampler: Sampler
    _rollout_id: int
    _version: int
    _consumed: int

    async def get_samples(self, count: int) -> list[list[Sample]]:
        """--n-samples-per-prompt samples of each of the next `count` prompts: with prompt, label and metadata, status
        "pending"."""
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"get_samples({short(count)}): expected a number from 1")
        taken = await self._store.next_groups(count, self._rollout_id, self._version, self._consumed)
        return [self._pending(progress) for progress in sorted(taken, key=lambda progress: progress.number)]

    def _pending(self, progress: GroupProgress) -> list[Sample]:
        found = []
        for index in range(self._options.n_samples_per_prompt):
            sample = pending_sample(progress.number, index, progress.group.prompt, self._options.n_samples_per_prompt)
            found += progress.finished.get(index, [sample])  # an earlier attempt may have left some on disk
        return found

    async def generate(self, sample: Sample) -> list[Sample]:
        """The run's own way from a pending sample to finished ones, reward included; a finished one comes back as it
        is."""
        if sample.status != PENDING:
            return [sample]
        if sample.group_index not in self._store.held:
            raise ValueError(f"group {sample.group_index} does not belong to this rollout")
        return await self._sampler.make(
            ResponseRequest(
                self._store.groups[sample.group_index].group, sample.response_index, self._rollout_id, self._version
            )
        )

    async def generate_group(self, samples: Sequence[Sample]) -> list[Sample]:
        """The same for all samples of a group, side by side."""
        found = await asyncio.gather(*(self.generate(sample) for sample in samples))
        return [sample for several in found for sample in several]


class CustomGenerator:
    """Makes one rollout after another by the function of --rollout-function-path."""

    def __init__(self, options: Options, store: GroupStore, sampler: Sampler, function: Callable[..., Any]) -> None:
        self._options = options
        self._store = store
        self._sampler = sampler
        self._args = Arguments(options)
        self._function = function
        self._shown = f"--rollout-function-path {options.rollout_function_path}"

    def __str__(self) -> str:
        """Who is awaited, for an error."""
        return f"what {self._shown} makes"

    async def make(self, rollout_id: int, version: int, consumed: int | None = None) -> GeneratedRollout:
        """The rollout, as `RolloutGenerator.make`.

        Raises:
            HpcrlError: if the function raises, or returns no whole batch of what it was given.
        """
        store = self._store
        consumed = version if consumed is None else consumed
        source = RolloutSource(self._options, self._store, self._sampler, rollout_id, version, consumed)
        found = await call_hook(self._shown, self._function, self._args, rollout_id, source, evaluation=False)
        batch = self._taken(getattr(found, "samples", found))
        numbers = read_metrics(self._shown, getattr(found, "metrics", None) or {}, "rollout/")
        for number in sorted(batch):
            if number in store.ledger.in_flight:
                await store.write(store.groups[number])
                store.ledger.finish(number)
        unused = sorted(store.held - set(batch))
        dropped = [sample for number in unused for sample in store.groups[number].all_samples()]
        store.drop(unused, UNUSED)
        rollout, line = store.hand_over(rollout_id, batch, version, consumed)
        return GeneratedRollout(rollout, numbers, dropped, line)

    def _taken(self, groups: Any) -> list[int]:
        """The numbers of the groups that were returned, whose samples are kept.

        Raises:
            HpcrlError: unless they are a batch of those that were given, each once and whole.
        """
        wanted, each = self._options.rollout_batch_size, self._options.n_samples_per_prompt
        if (
            not isinstance(groups, list)
            or len(groups) != wanted
            or not all(isinstance(group, list) for group in groups)
        ):
            count = f" of {len(groups)}" if isinstance(groups, list) else ""
            raise HpcrlError(
                f"{self._shown} returned {type(groups).__name__}{count}, expected a list of {wanted} groups"
            )
        batch: list[int] = []
        for group in groups:
            check_samples(self._shown, group)
            by_index: dict[int, list[Sample]] = {}
            for sample in group:
                by_index.setdefault(sample.response_index, []).append(sample)
            number, *others = {sample.group_index for sample in group} or {-1}
            if others or number not in self._store.held or number in batch:
                raise HpcrlError(
                    f"{self._shown} returned a group that it was not given, or a group twice: {short(group)}"
                )
            if by_index.keys() != set(range(each)):
                has = ", ".join(map(str, sorted(by_index)))
                raise HpcrlError(f"{self._shown} returned of group {number} the responses {has}, not all {each}")
            if waits := next((one for one in group if not is_finished(one)), None):
                raise HpcrlError(f"{self._shown} returned {waits!r}: it must be finished and graded")
            self._store.groups[number].finished = by_index
            batch.append(number)
        return batch
