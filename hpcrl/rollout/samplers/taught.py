"""Samples of another sampler, with what a teacher says of their tokens.

Invariant: the teacher changes no token and no reward; what nobody trains on is not shown to it: greedy and unfinished
responses.
"""

from __future__ import annotations

import asyncio

from hpcrl.rollout.engines.teacher import Teacher
from hpcrl.rollout.samplers.sampler import GREEDY, Asked, Sampler
from hpcrl.sample import ABORTED, Sample


class TaughtSampler:
    """Shows every sample to the teacher once it is made."""

    def __init__(self, maker: Sampler, teacher: Teacher) -> None:
        self._maker = maker
        self._teacher = teacher

    async def make(self, asked: Asked) -> list[Sample]:
        samples = await self._maker.make(asked)
        if asked.index != GREEDY and not any(sample.status == ABORTED for sample in samples):
            where = asked.group.prompt.where
            await asyncio.gather(*(self._teacher.mark(sample, asked.rollout_id, where) for sample in samples))
        return samples
