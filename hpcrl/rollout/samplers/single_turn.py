"""One response of an engine to a prompt, graded: the sampler of runs without tools or turns.

Invariant: every request brings a seed made of --rollout-seed, rollout, group and index, so that no two samples share
their noise, whichever engine answers.  In deterministic mode a sample depends on that seed, the weights and the prompt
alone, and not on what else was in flight.
"""

from __future__ import annotations

from dataclasses import replace

from hpcrl.config.options import Options
from hpcrl.rollout.engines.completion import completion_of
from hpcrl.rollout.engines.engine_client import Generator, Sampling, seed_of
from hpcrl.rollout.grading.service import Grading
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.sampler import GREEDY, Asked
from hpcrl.sample import ABORTED, Sample


class SingleTurnSampler:
    """Samples from the policy, graded by the reward where there is one."""

    def __init__(self, options: Options, tokenizer: Tokenizer, generator: Generator, grading: Grading | None) -> None:
        self._sampling = Sampling.of(options, tokenizer)
        self._seed = options.rollout_seed
        self._tokenizer = tokenizer
        self._generator = generator
        self._grading = grading
        self._size = options.samples_per_rollout
        self._each = options.n_samples_per_prompt

    async def make(self, asked: Asked) -> list[Sample]:
        group, index = asked.group, asked.index
        seed = seed_of("train", self._seed, asked.rollout_id, group.number, index)
        sampling = self._sampling if index != GREEDY else replace(self._sampling, temperature=0.0)
        completion = completion_of(*asked.begun) if asked.begun else None
        if completion is None or completion.status == ABORTED:
            completion = await self._generator.complete(
                group.prompt.tokens, sampling, seed, asked.version, begun=completion
            )
        stops = frozenset(self._sampling.stop_token_ids)
        skip = self._sampling.skip_special_tokens
        response = self._tokenizer.decode(completion.tokens, stops, skip)
        sample = completion.sample(group.number, index, group.prompt, response)
        if sample.status == ABORTED:
            return [sample]
        asked.made.append(sample)
        if self._grading is not None:
            tally = self._grading.tally(f"rollout {asked.rollout_id}", self._size, self._each)
            await self._grading.grade(sample, group.prompt.where, tally)
        return [sample]
