"""Held-out accuracy: responses to prompts that are never trained on, graded by the run's reward.

Invariant: the seed of every response depends on the set, the line and the index alone, so evaluating the same weights
again gives the same numbers; nothing of an evaluation reaches the trainer's data.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hpcrl.config.options import Options
from hpcrl.errors import UsageError
from hpcrl.rollout.engines.generate import Generator, Sampling, seed_of
from hpcrl.rollout.grading.service import Grading
from hpcrl.rollout.grading.tally import grading_metrics
from hpcrl.rollout.prompts.prompt_files import Prompt, PromptFile, Reading, read_prompts
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.custom import CustomSampler
from hpcrl.rollout.samplers.sampler import Asked, HeldOutSet
from hpcrl.sample import TRUNCATED, Sample


@dataclass(frozen=True)
class HeldOut:
    """One held-out set."""

    name: str
    file: PromptFile


def read_held_out(options: Options, tokenizer: Tokenizer) -> list[HeldOut]:
    """The sets of --eval-prompt-data.  UsageError if it is no list of NAME PATH; DataError as `read_prompts`."""
    words = options.eval_prompt_data
    if len(words) % 2:
        raise UsageError(f"--eval-prompt-data {' '.join(words)} is not NAME PATH [NAME PATH ...]", "each file needs a name")
    names = words[::2]
    for name in names:
        if not re.fullmatch(r"[\w.+-]+", name) or names.count(name) > 1:
            raise UsageError(
                f"--eval-prompt-data: {name!r} cannot be a name", "use letters, digits, '_', '-', '.', '+', each name once"
            )
    reading = Reading.of(options, tokenizer, evaluation=True)
    return [HeldOut(name, read_prompts(path, reading, tokenizer)) for name, path in zip(names, words[1::2], strict=True)]


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
        self._custom = custom
        self._seed, self._each = options.rollout_seed, options.n_samples_per_eval_prompt
        self._sampling = Sampling.of(options, tokenizer, evaluation=True)
        self._tokenizer, self._generator, self._grading = tokenizer, generator, grading

    async def samples(self, held: HeldOut, version: int) -> list[Sample]:
        """--n-samples-per-eval-prompt graded responses to every prompt, in the order of the file."""
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._one(held, number, prompt, index, version))
                for number, prompt in enumerate(held.file.prompts)
                for index in range(self._each)
            ]
        return [task.result() for task in running]

    async def _one(self, held: HeldOut, number: int, prompt: Prompt, index: int, version: int) -> Sample:
        if self._custom is not None:
            whole = HeldOutSet(held.name, held.file.path, len(held.file) * self._each, self._each)
            found = await self._custom.make(Asked(Group(number, prompt), index, -1, version, whole))
            return replace(found[-1], reward=float(np.mean([sample.reward for sample in found])))
        assert self._grading is not None
        tally = self._grading.tally(
            f"evaluation {held.name} of policy version {version}", len(held.file) * self._each, self._each
        )
        seed = seed_of("evaluate", self._seed, held.name, number, index) if self._sampling.temperature > 0 else None
        completion = await self._generator.complete(prompt.tokens, self._sampling, seed, version)
        stops, skip = frozenset(self._sampling.stop_token_ids), self._sampling.skip_special_tokens
        sample = completion.sample(number, index, prompt, self._tokenizer.decode(completion.tokens, stops, skip))
        await self._grading.grade(sample, f"{held.file.path}, line {prompt.line}", tally, evaluation=True)
        return sample


def results(samples: list[Sample]) -> dict[str, Any]:
    """accuracy: mean reward; response_len: mean tokens; truncated_ratio; n: responses; and `grading_metrics`."""
    return grading_metrics(samples) | {
        "accuracy": float(np.mean([s.reward for s in samples])),
        "response_len": float(np.mean([s.response_length for s in samples])),
        "truncated_ratio": float(np.mean([s.status == TRUNCATED for s in samples])),
        "n": len(samples),
    }
