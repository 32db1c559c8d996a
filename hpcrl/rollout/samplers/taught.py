"""Samples of another sampler, with what a teacher says of their tokens.

Invariant: the teacher changes no token and no reward; what nobody trains on is not shown to it: greedy and unfinished responses.
"""

from __future__ import annotations

import asyncio

from hpcrl.rollout.engines.teacher import Teacher
from hpcrl.rollout.samplers.sampler import GREEDY, Asked, Sampler
from hpcrl.sample import ABORTED, Sample


class TaughtSampler:
    """Shows every sample to the teacher once it is made.  file: the prompts', for messages."""

    def __init__(self, maker: Sampler, teacher: Teacher, file: str) -> None:
        self._maker, self._teacher, self._file = maker, teacher, file

    async def make(self, asked: Asked) -> list[Sample]:
        samples = await self._maker.make(asked)
        if asked.index != GREEDY and not any(sample.status == ABORTED for sample in samples):
            where = f"{self._file}, line {asked.group.prompt.line}"
            await asyncio.gather(*(self._teacher.mark(sample, asked.rollout_id, where) for sample in samples))
        return samples
