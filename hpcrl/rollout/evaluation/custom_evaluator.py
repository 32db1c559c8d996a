"""Held-out samples that a function of the user's makes (--eval-function-path), in the place of `Evaluator.samples`.

    for name in data_source.names:
        groups = await data_source.get_samples(name)        # of every prompt of the set: samples without a response
        done = await data_source.generate_group(groups[0])  # sampled and graded as the set says

Invariants: what is returned is checked against what was given: of each set all responses, finished and with a reward,
or numbers; what it raises is one error that names the option; it can change what a sample says, never which prompts a
set has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcrl.config.custom_functions import short
from hpcrl.config.eval_sets import NAME
from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.rollout.custom_hooks import call_hook, check_samples, expect, floats, is_finished, read_metrics
from hpcrl.rollout.engines.completion import pending_sample
from hpcrl.rollout.evaluation.evaluator import Evaluator, HeldOut
from hpcrl.rollout.samplers.sampler import ResponseRequest
from hpcrl.rollout.slime_names.arguments import Arguments
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import PENDING


class HeldOutSource:
    """What the function is given as data_source, for one evaluation.  Groups are numbered on from set to set."""

    def __init__(self, evaluator: Evaluator, sets: Sequence[HeldOut], version: int) -> None:
        self._evaluator = evaluator
        self._version = version
        self.sets = {held.name: held for held in sets}
        ends = np.cumsum([0, *(len(held.file) for held in sets)]).tolist()
        self.first = dict(zip(self.sets, ends, strict=False))  #: set -> the number of its first group
        self._asked: dict[tuple[int, int], tuple[HeldOut, ResponseRequest]] = {}

    @property
    def names(self) -> list[str]:
        """Of the held-out sets, in order."""
        return list(self.sets)

    async def get_samples(self, name: str | None = None) -> list[list[Sample]]:
        """A group for each prompt of a set, with as many pending samples as the set has responses; without a name: of
        the only set."""
        name = self.names[0] if name is None and len(self.sets) == 1 else name
        if name not in self.sets:
            raise ValueError(f"get_samples({name!r}): there are the sets {', '.join(self.names)}")
        groups: dict[int, list[Sample]] = {}
        for asked in self._evaluator.request_responses(held := self.sets[name], self._version):
            number = self.first[name] + asked.group.number
            self._asked[number, asked.index] = held, asked
            sample = pending_sample(number, asked.index, asked.group.prompt, held.eval_set.n_samples)
            groups.setdefault(number, []).append(sample)
        return list(groups.values())

    async def generate(self, sample: Sample) -> list[Sample]:
        """The set's own way from a pending sample to a finished one, reward included; a finished one comes back as it
        is."""
        if sample.status != PENDING:
            return [sample]
        if (sample.group_index, sample.response_index) not in self._asked:
            raise ValueError(
                f"response {sample.response_index} of group {sample.group_index} does not belong to this evaluation"
            )
        held, asked = self._asked[sample.group_index, sample.response_index]
        return [(await self._evaluator.one(held, asked)).replace(group_index=sample.group_index)]

    async def generate_group(self, samples: Sequence[Sample]) -> list[Sample]:
        """The same for several samples, side by side."""
        found = await asyncio.gather(*(self.generate(sample) for sample in samples))
        return [sample for several in found for sample in several]


class Evaluated(NamedTuple):
    """What an evaluation of the user's returned.

    Attributes:
        samples: of the sets that samples were returned of, in the order of the file.
        numbers: by set, to be logged besides.
    """

    samples: dict[str, list[Sample]]
    numbers: dict[str, dict[str, float]]


class CustomEvaluator:
    """Evaluates by the function of --eval-function-path."""

    def __init__(
        self, options: Options, evaluator: Evaluator, sets: Sequence[HeldOut], function: Callable[..., Any]
    ) -> None:
        self._args = Arguments(options)
        self._evaluator = evaluator
        self._sets = sets
        self._function = function
        self._shown = f"--eval-function-path {options.eval_function_path}"

    async def make(self, rollout_id: int, version: int) -> Evaluated:
        """All sets of the weights after `rollout_id`.

        Raises:
            HpcrlError: if the function raises, or returns something else than is wanted.
        """
        source = HeldOutSource(self._evaluator, self._sets, version)
        found = await call_hook(self._shown, self._function, self._args, rollout_id, source, evaluation=True)
        rows = getattr(found, "data", found)
        if isinstance(rows, list) and len(source.sets) == 1:
            rows = {source.names[0]: rows}
        if not isinstance(rows, Mapping) or not all(isinstance(name, str) and NAME.fullmatch(name) for name in rows):
            raise HpcrlError(
                f"{self._shown} returned {short(rows)}, expected samples or numbers by the name of the set"
            )
        if missing := [name for name in source.sets if name not in rows]:
            raise HpcrlError(
                f"{self._shown} returned nothing of the set {missing[0]}", f"it returned {', '.join(rows) or 'no set'}"
            )
        made = Evaluated({}, {})
        for name, row in rows.items():
            self._read(source, made, name, row)
        self._add_metrics(made, getattr(found, "metrics", None) or {})
        return made

    def _read(self, source: HeldOutSource, made: Evaluated, name: str, row: Any) -> None:
        """What was returned of a set: its samples, slime's lists, or numbers."""
        shown = f"{self._shown}, set {name},"
        rewards = row.get("rewards") if isinstance(row, Mapping) else None
        given = expect(shown, rewards, "finite rewards are expected", floats) if rewards is not None else None
        if isinstance(row, Mapping) and isinstance(row.get("samples"), list):
            row = _flat(row["samples"])
            if given is not None and len(given) != len(row):
                raise HpcrlError(f"{shown} returned {len(given)} rewards for {len(row)} samples")
            check_samples(shown, row)
            row = [sample.replace(reward=value) for sample, value in zip(row, given, strict=True)] if given else row
        if isinstance(row, list):
            made.samples[name] = self._samples(source, name, _flat(row))
        elif given:
            truncated = expect(shown, row.get("truncated") or [], "finite numbers are expected", floats)
            right = float(all(reward in (0, 1) for reward in given))
            means = {"accuracy": sum(given) / len(given), "n": float(len(given)), "right_or_wrong": right}
            made.numbers[name] = means | ({"truncated_ratio": sum(truncated) / len(truncated)} if truncated else {})
        else:
            made.numbers[name] = read_metrics(shown, row)
            if not made.numbers[name]:
                raise HpcrlError(f"{shown} returned no number")

    def _samples(self, source: HeldOutSource, name: str, row: list[Any]) -> list[Sample]:
        """The samples of a set, one a response, in the order of the file.

        Raises:
            HpcrlError: unless they are all there.
        """
        if name not in source.sets:
            raise HpcrlError(
                f"{self._shown} returned samples of {name}, which is not a held-out set",
                f"there are {', '.join(source.sets)}",
            )
        held, first = source.sets[name], source.first[name]
        check_samples(self._shown, row)
        found: dict[tuple[int, int], list[Sample]] = {}
        for sample in row:
            if not 0 <= sample.group_index - first < len(held.file):
                raise HpcrlError(f"{self._shown} returned no sample of the set {name}: {sample!r}")
            if not is_finished(sample):
                raise HpcrlError(f"{self._shown} returned {sample!r} ({name}): it must be finished and graded")
            found.setdefault((sample.group_index - first, sample.response_index), []).append(sample)
        wanted = [(line, index) for line in range(len(held.file)) for index in range(held.eval_set.n_samples)]
        if sorted(found) != wanted:
            raise HpcrlError(
                f"{self._shown} returned {len(found)} responses of the set {name}, "
                f"{held.eval_set.n_samples} to each of its {len(held.file)} prompts are expected",
                f"a part of a set is named PATH@[:{max(1, len(found) // held.eval_set.n_samples)}]",
            )
        if twice := next((key for key, several in found.items() if len(several) > 1), None):
            raise HpcrlError(f"{self._shown} returned response {twice[1]} of group {first + twice[0]} ({name}) twice")
        return [found[key][0].replace(group_index=key[0]) for key in wanted]

    def _add_metrics(self, made: Evaluated, metrics: Any) -> None:
        """slime's metrics, which name the set: "eval/aime/solved"."""
        for name, value in read_metrics(self._shown, metrics).items():
            held, _, key = name.removeprefix("eval/").partition("/")
            if not key or held not in {*made.samples, *made.numbers}:
                raise HpcrlError(
                    f"{self._shown} returned the metric {name!r}, expected SET/NAME of a set that it returned"
                )
            made.numbers.setdefault(held, {})[key] = value


def _flat(row: Sequence[Any]) -> list[Any]:
    """Samples, or groups of samples, as samples."""
    return [sample for part in row for sample in (part if isinstance(part, list) else [part])]
