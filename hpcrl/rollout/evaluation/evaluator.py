"""Held-out accuracy: responses to prompts that are never trained on, each set sampled and graded as it says.

Invariant: the seed of every response depends on the set, the line and the index alone, so evaluating the same weights
again gives the same numbers; nothing of an evaluation reaches the trainer's data.

Whoever calls `Evaluator.samples` decides what else goes on meanwhile: the synchronous loop waits for it.  A loop that
goes on sampling may await it as a task beside its own, as long as no weights are published before it is done (`version`
is checked).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcrl.config.eval_sets import EvalSet, eval_sets
from hpcrl.config.options import Options
from hpcrl.rollout.engines.engine_client import Generator, Sampling, seed_of
from hpcrl.rollout.evaluation.results import results
from hpcrl.rollout.grading.service import GradedBy, Grading
from hpcrl.rollout.prompts.prompt_files import PromptFile, Reading, read_prompts
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.custom import CustomSampler
from hpcrl.rollout.samplers.sampler import Asked, HeldOutSet
from hpcrl.sample import Sample


@dataclass(frozen=True)
class HeldOut:
    """One held-out set, read."""

    of: EvalSet
    file: PromptFile

    @property
    def name(self) -> str:
        return self.of.name

    def results(self, samples: list[Sample], passrate: bool) -> dict[str, Any]:
        """What is logged of its responses."""
        return results(samples, self.of.n_samples, passrate, self.file.dropped)


def read_held_out(options: Options, tokenizer: Tokenizer) -> list[HeldOut]:
    """The sets of --eval-prompt-data or --eval-config.  UsageError and DataError say what is wrong with one."""
    drop = options.overlong_prompts == "drop"
    return [
        HeldOut(
            held,
            read_prompts(
                held.word, Reading.of_set(held, tokenizer, drop), tokenizer.given(held.apply_chat_template_kwargs)
            ),
        )
        for held in eval_sets(options)
    ]


def sampling_of(held: EvalSet, options: Options, tokenizer: Tokenizer) -> Sampling:
    """How a set is sampled.  The model's end-of-sequence ids always stop."""
    return replace(
        Sampling.of(options, tokenizer, evaluation=True),
        temperature=held.temperature,
        max_tokens=held.max_response_len,
        top_p=held.top_p,
        top_k=held.top_k,
        min_p=held.min_p,
        min_tokens=held.min_new_tokens,
        repetition_penalty=held.repetition_penalty,
        stop=held.stop,
        stop_token_ids=tuple(sorted({*held.stop_token_ids, *tokenizer.eos_ids})),
        skip_special_tokens=held.skip_special_tokens,
    )


class Evaluator:
    """Evaluates the engines' current weights."""

    def __init__(
        self,
        options: Options,
        tokenizer: Tokenizer,
        generator: Generator,
        grading: Grading | None,
        custom: CustomSampler | None = None,
    ) -> None:
        """custom: makes the responses where the training's are made by the user's function."""
        assert grading is not None or custom is not None
        self._options = options
        self._tokenizer = tokenizer
        self._generator = generator
        self._grading = grading
        self._custom = custom

    async def samples(self, held: HeldOut, version: int) -> list[Sample]:
        """The graded responses to every prompt of a set, in the order of the file."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self.one(held, asked)) for asked in self.asked(held, version)]
        return [task.result() for task in running]

    def asked(self, held: HeldOut, version: int) -> Iterator[Asked]:
        """Every response that a set wants, in the order of the file."""
        each = held.of.n_samples
        by = GradedBy(held.of.rewards, held.of.own_types, held.of.reward_key)
        sampling = sampling_of(held.of, self._options, self._tokenizer)
        whole = HeldOutSet(held.name, len(held.file) * each, each, sampling, by)
        for number, prompt in enumerate(held.file.prompts):
            for index in range(each):
                yield Asked(Group(number, prompt), index, -1, version, whole)

    async def one(self, held: HeldOut, asked: Asked) -> Sample:
        """A graded response of a set."""
        assert asked.held_out is not None
        number = asked.group.number
        prompt = asked.group.prompt
        index = asked.index
        sampling = asked.held_out.sampling
        if (context := held.of.max_context_len) is not None:
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, context - len(prompt.tokens)))
        if self._custom is not None:
            asked = replace(asked, held_out=replace(asked.held_out, sampling=sampling))
            found = await self._custom.make(asked)
            return replace(found[-1], reward=float(np.mean([sample.reward for sample in found])))
        assert self._grading is not None
        what = f"evaluation {held.name} of policy version {asked.version}"
        tally = self._grading.tally(what, asked.held_out.size, asked.held_out.each)
        seed = (
            seed_of("evaluate", self._options.rollout_seed, held.name, number, index)
            if sampling.temperature > 0
            else None
        )
        completion = await self._generator.complete(prompt.tokens, sampling, seed, asked.version)
        response = self._tokenizer.decode(
            completion.tokens, frozenset(sampling.stop_token_ids), sampling.skip_special_tokens
        )
        sample = completion.sample(number, index, prompt, response)
        await self._grading.grade(sample, prompt.where, tally, asked.held_out.by)
        return sample
