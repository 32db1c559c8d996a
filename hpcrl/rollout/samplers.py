"""Makers of samples: from a group's prompt to one finished sample, with an engine or from the label.

Invariant: in deterministic mode a sample depends on the weights, the prompt, and a seed made of run seed, rollout,
group and index; not on which engine answered, or what else was in flight.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hpcrl.config.options import Options
from hpcrl.rollout.generate import Completion, Generator, Sampling, seed_of
from hpcrl.rollout.grading.service import Grading
from hpcrl.rollout.prompt_files import PromptFile
from hpcrl.rollout.prompt_source import Group
from hpcrl.rollout.tokenizer import Tokenizer
from hpcrl.sample import COMPLETED, Sample


class Sampler(Protocol):
    """Makes samples."""

    async def make(self, group: Group, index: int, rollout_id: int, version: int) -> Sample:
        """Sample `index` of `group`, for `rollout_id`, under policy `version`; reward set, advantage not."""


class EngineSampler:
    """Samples from the policy, graded by the reward."""

    def __init__(self, options: Options, file: PromptFile, tokenizer: Tokenizer, generator: Generator, grading: Grading) -> None:
        self._sampling = Sampling.of(options, tokenizer)
        self._seed = options.rollout_seed if options.deterministic_mode else None
        self._file, self._tokenizer, self._generator, self._grading = file, tokenizer, generator, grading
        self._size, self._each = options.samples_per_rollout, options.n_samples_per_prompt

    async def make(self, group: Group, index: int, rollout_id: int, version: int) -> Sample:
        # without deterministic mode no seed: a generator of its own for every request slows a GPU engine's sampler down
        seed = None if self._seed is None else seed_of("train", self._seed, rollout_id, group.number, index)
        completion = await self._generator.complete(group.prompt.tokens, self._sampling, seed, version)
        response = self._tokenizer.decode(completion.tokens, frozenset(self._sampling.stop_token_ids))
        sample = completion.sample(group.number, index, group.prompt, response)
        tally = self._grading.tally(f"rollout {rollout_id}", self._size, self._each)
        await self._grading.grade(sample, f"{self._file.path}, line {group.prompt.line}", tally)
        return sample


class LabelSampler:
    """Fine-tuning: the label is the response, every token of it is to be learned."""

    async def make(self, group: Group, index: int, rollout_id: int, version: int) -> Sample:
        target = group.prompt.target
        assert target is not None, "the prompt file was read for fine-tuning"
        nothing, versions = np.zeros(len(target), np.float32), np.full(len(target), version, np.int32)
        return Completion(target, nothing, versions, COMPLETED).sample(group.number, index, group.prompt, str(group.prompt.label))
