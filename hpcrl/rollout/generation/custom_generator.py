"""A rollout made by a function of the user's (--rollout-function-path), in place of `generator.py`.

    groups = await data_source.get_samples(4)          # of four prompts: samples that wait for their response
    done = await data_source.generate(groups[0][0])    # sampled by the engines, and graded: one sample, or several

Invariants: the function can lose or invent no group: what it returns is checked against what it was given, and groups
that it was given and did not return are dropped, with a reason; whatever it raises is one error that names the option.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrl.config.custom_functions import named, settled, short
from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.rollout.engines.completion import pending_sample
from hpcrl.rollout.generation.generator import GeneratedRollout
from hpcrl.rollout.generation.group_store import GroupStore
from hpcrl.rollout.ledger.group_progress import GroupProgress
from hpcrl.rollout.samplers.sampler import ResponseRequest, Sampler
from hpcrl.rollout.slime_names.arguments import Arguments
from hpcrl.sample import BadSample, Sample
from hpcrl.utils.sample_parts import COMPLETED, PENDING, TRUNCATED

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
            raise ValueError(f"get_samples({short(count)}): a number from 1 is wanted")
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
            raise ValueError(f"group {sample.group_index} is none of this rollout's")
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
        with named(self._shown):
            found = await settled(self._function(self._args, rollout_id, source, evaluation=False))
        groups = getattr(found, "samples", found)
        metrics = getattr(found, "metrics", None) or {}
        batch = [self._number_of(group) for group in self._whole(groups)]
        if len(set(batch)) < len(batch):
            raise HpcrlError(f"{self._shown} returned a group twice")
        for number in sorted(batch):
            if number in store.ledger.in_flight:
                await store.write(store.groups[number])
                store.ledger.finish(number)
        unused = sorted(store.held - set(batch))
        dropped = [sample for number in unused for sample in store.groups[number].all_samples()]
        store.drop(unused, UNUSED)
        rollout, line = store.hand_over(rollout_id, batch, version, consumed)
        return GeneratedRollout(rollout, self._numbers(metrics), dropped, line)

    def _whole(self, groups: Any) -> list[list[Sample]]:
        wanted = self._options.rollout_batch_size
        if (
            not isinstance(groups, list)
            or len(groups) != wanted
            or not all(isinstance(group, list) and group for group in groups)
        ):
            count = f" of {len(groups)}" if isinstance(groups, list) else ""
            raise HpcrlError(
                f"{self._shown} returned {type(groups).__name__}{count}, a list of {wanted} groups is wanted"
            )
        return groups

    def _number_of(self, group: list[Sample]) -> int:
        """Which group was returned; its samples are kept."""
        number = getattr(group[0], "group_index", None)
        given = isinstance(number, int) and number in self._store.held
        if not given or not all(isinstance(sample, Sample) and sample.group_index == number for sample in group):
            raise HpcrlError(f"{self._shown} returned a group that is none of those it was given: {short(group)}")
        found: dict[int, list[Sample]] = {}
        for sample in group:
            try:
                sample.check()
            except BadSample as error:
                raise HpcrlError(f"{self._shown} {error} (of group {number})") from error
            if sample.status not in (COMPLETED, TRUNCATED) or not sample.graded:
                state = f"{sample.status}, {'graded' if sample.graded else 'without a reward'}"
                raise HpcrlError(
                    f"{self._shown} returned sample {sample.response_index} of group {number} {state}: it must be "
                    "finished"
                )
            found.setdefault(sample.response_index, []).append(sample)
        if set(found) != set(range(self._options.n_samples_per_prompt)):
            has = ", ".join(map(str, sorted(found)))
            raise HpcrlError(
                f"{self._shown} returned of group {number} the responses {has}, not all "
                f"{self._options.n_samples_per_prompt}"
            )
        self._store.groups[number].finished = found
        return number

    def _numbers(self, metrics: Any) -> dict[str, float]:
        try:
            if not isinstance(metrics, Mapping):
                raise TypeError
            found = {f"rollout/{str(name).removeprefix('rollout/')}": float(value) for name, value in metrics.items()}
            if not all(map(math.isfinite, found.values())):
                raise ValueError
        except (TypeError, ValueError):
            raise HpcrlError(
                f"{self._shown} returned metrics {short(metrics)}, names with finite numbers are wanted"
            ) from None
        return found
