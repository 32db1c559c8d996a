"""What a sampler is, from a prompt of a group to one or several finished, graded samples; and the two plain ones.

Invariants: a sampler knows nothing of batches, filters or the ledger; its caller decides what becomes of its samples.
Every request of `SingleTurnSampler` brings a seed made of --rollout-seed, rollout (or held-out set), group and index,
so that no two samples share their noise, whichever engine answers.  In deterministic mode a sample depends on that
seed, the weights and the prompt alone, and not on what else was in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from hpcrl.config.options import Options
from hpcrl.rollout.engines.completion import Completion, Sampling, completion_of, seed_of
from hpcrl.rollout.engines.engine_client import EngineClient
from hpcrl.rollout.grading.service import GradedBy, Grading
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.sample import Sample
from hpcrl.utils.sample_parts import ABORTED, COMPLETED

#: in place of a sample's index: the likeliest response, which is not a sample but what samples are compared with
GREEDY = -1


@dataclass(frozen=True)
class HeldOutSet:
    """The held-out set that a response is asked for: its name, how many responses it wants in all and to a prompt, how
    they are sampled, and what grades them."""

    name: str
    size: int
    n_samples_per_prompt: int
    sampling: Sampling
    by: GradedBy


@dataclass(frozen=True)
class ResponseRequest:
    """Response `index` (or GREEDY) to the prompt of `group`, for rollout `rollout_id`, under policy `version`.

    Attributes:
        held_out: in an evaluation, whose groups are numbered by the lines of the set.
        partial: what an earlier call returned of it, to be resumed: unfinished (ABORTED), or finished and not graded; a
            sampler that cannot resume begins again.
        results: where the sampler leaves what is finished before it waits for the reward, so that it is kept if that
            wait is given up.
    """

    group: Group
    index: int
    rollout_id: int
    version: int
    held_out: HeldOutSet | None = None
    partial: tuple[Sample, ...] = ()
    results: list[Sample] = field(default_factory=list, compare=False)

    def sampling(self, training: Sampling) -> Sampling:
        """How it is sampled.

        Args:
            training: how responses of a training batch are.
        """
        sampling = self.held_out.sampling if self.held_out else training
        return replace(sampling, temperature=0.0) if self.index == GREEDY else sampling

    def seed(self, rollout_seed: int) -> tuple[object, ...]:
        """What its seed is made of (`seed_of`)."""
        what = ("evaluate", self.held_out.name) if self.held_out else ("train", self.rollout_id)
        return what[0], rollout_seed, what[1], self.group.number, self.index

    def batch(self, options: Options) -> tuple[str, int, int]:
        """(name, responses, responses to a prompt) of the batch that it is for."""
        if held := self.held_out:
            return f"evaluation {held.name} of policy version {self.version}", held.size, held.n_samples_per_prompt
        return f"rollout {self.rollout_id}", options.samples_per_rollout, options.n_samples_per_prompt


class Sampler(Protocol):
    """Makes samples."""

    async def make(self, asked: ResponseRequest) -> list[Sample]:
        """The samples of one response, rewards set: one, or, where a conversation is cut into several, all of them.

        ABORTED, and without a reward, if the engine was told to end it: then with the tokens that it has so far.
        """


class SingleTurnSampler:
    """Samples from the policy, graded by the reward where there is one."""

    def __init__(self, options: Options, tokenizer: Tokenizer, client: EngineClient, grading: Grading | None) -> None:
        self._options = options
        self._train = Sampling.from_options(options, tokenizer)
        self._tokenizer = tokenizer
        self._client = client
        self._grading = grading

    async def make(self, asked: ResponseRequest) -> list[Sample]:
        group, sampling, batch = asked.group, asked.sampling(self._train), asked.batch(self._options)
        seed = seed_of(*asked.seed(self._options.rollout_seed))
        completion = completion_of(*asked.partial) if asked.partial else None
        if completion is None or completion.status == ABORTED:
            completion = await self._client.complete(
                group.prompt.tokens, sampling, seed, asked.version, begun=completion
            )
        stops = frozenset(sampling.stop_token_ids)
        response = self._tokenizer.decode(completion.tokens, stops, sampling.skip_special_tokens)
        sample = completion.sample(group.number, asked.index, group.prompt, response, batch[-1])
        if sample.status == ABORTED:
            return [sample]
        asked.results.append(sample)
        if self._grading is not None:
            by = asked.held_out.by if asked.held_out else None
            await self._grading.grade(sample, group.prompt.where, self._grading.tally(*batch), by)
        return [sample]


class LabelSampler:
    """What the prompt file holds: the label, or of a pair the better response (the label, reward 1) and the worse
    (reward 0).

    Of a conversation the whole rest is the response, and the mask says which tokens are the assistant's.
    """

    async def make(self, asked: ResponseRequest) -> list[Sample]:
        prompt = asked.group.prompt
        index = asked.index
        pair = asked.group.prompt.rejected is not None
        target = prompt.rejected if pair and index else prompt.target
        assert target is not None, "the prompt file was read for learning what it holds"
        nothing = np.zeros(len(target), np.float32)
        versions = np.full(len(target), asked.version, np.int32)
        response = "" if prompt.mask is not None else str(prompt.worse if pair and index else prompt.label)
        sample = Completion(target, nothing, versions, COMPLETED).sample(asked.group.number, index, prompt, response)
        if prompt.mask is not None:
            sample.loss_mask = prompt.mask
        sample.reward = float(pair and not index)
        return [sample]
