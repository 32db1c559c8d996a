"""Makers of samples: from a group's prompt to one finished sample, with an engine or from the label.

Invariant: every request brings a seed made of --rollout-seed, rollout, group and index, so that no two samples share their
noise, whichever engine answers.  In deterministic mode a sample depends on that seed, the weights and the prompt alone, and not
on what else was in flight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from hpcrl.config.options import Options
from hpcrl.rollout.generate import Completion, Generator, Sampling, seed_of
from hpcrl.rollout.grading.service import Grading
from hpcrl.rollout.prompt_files import PromptFile
from hpcrl.rollout.prompt_source import Group
from hpcrl.rollout.tokenizer import Tokenizer
from hpcrl.sample import COMPLETED, Sample

#: in place of a sample's index: the likeliest response, which is no sample but what samples are compared with
GREEDY = -1


class Sampler(Protocol):
    """Makes samples."""

    async def make(self, group: Group, index: int, rollout_id: int, version: int) -> Sample:
        """Sample `index` of `group`, for `rollout_id`, under policy `version`; reward set.  index GREEDY: the likeliest."""


class EngineSampler:
    """Samples from the policy, graded by the reward."""

    def __init__(self, options: Options, file: PromptFile, tokenizer: Tokenizer, generator: Generator, grading: Grading) -> None:
        self._sampling = Sampling.of(options, tokenizer)
        self._seed = options.rollout_seed
        self._file, self._tokenizer, self._generator, self._grading = file, tokenizer, generator, grading
        self._size, self._each = options.samples_per_rollout, options.n_samples_per_prompt

    async def make(self, group: Group, index: int, rollout_id: int, version: int) -> Sample:
        seed = seed_of("train", self._seed, rollout_id, group.number, index)
        sampling = self._sampling if index != GREEDY else replace(self._sampling, temperature=0.0)
        completion = await self._generator.complete(group.prompt.tokens, sampling, seed, version)
        response = self._tokenizer.decode(completion.tokens, frozenset(self._sampling.stop_token_ids))
        sample = completion.sample(group.number, index, group.prompt, response)
        tally = self._grading.tally(f"rollout {rollout_id}", self._size, self._each)
        await self._grading.grade(sample, f"{self._file.path}, line {group.prompt.line}", tally)
        return sample


class LabelSampler:
    """What the prompt file holds: the label, or of a pair the better response (the label, reward 1) and the worse (reward 0)."""

    async def make(self, group: Group, index: int, rollout_id: int, version: int) -> Sample:
        prompt, pair = group.prompt, group.prompt.rejected is not None
        target = prompt.rejected if pair and index else prompt.target
        assert target is not None, "the prompt file was read for learning what it holds"
        nothing, versions = np.zeros(len(target), np.float32), np.full(len(target), version, np.int32)
        response = str(prompt.worse if pair and index else prompt.label)
        sample = Completion(target, nothing, versions, COMPLETED).sample(group.number, index, prompt, response)
        sample.reward = float(pair and not index)
        return sample
