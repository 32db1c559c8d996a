"""What every maker of samples is: from a prompt of a group to one or several finished, graded samples.

Invariant: a sampler knows nothing of batches, filters or the ledger; whoever asks decides what becomes of its samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from hpcrl.rollout.engines.sampling import Sampling
from hpcrl.rollout.grading.service import GradedBy
from hpcrl.rollout.prompts.prompt_source import Group
from hpcrl.sample import Sample

#: in place of a sample's index: the likeliest response, which is no sample but what samples are compared with
GREEDY = -1


@dataclass(frozen=True)
class HeldOutSet:
    """The held-out set that a response is asked for: its name, how many responses it wants in all and to a prompt, how
    they are sampled, and what grades them."""

    name: str
    size: int
    each: int
    sampling: Sampling
    by: GradedBy


@dataclass(frozen=True)
class Asked:
    """Response `index` (or GREEDY) to the prompt of `group`, for rollout `rollout_id`, under policy `version`.

    held_out: in an evaluation, whose groups are numbered by the lines of the set.
    begun: what an earlier call returned of it, to be gone on with: unfinished (ABORTED), or finished and not graded; a
    sampler that cannot go on begins again.  made: where the sampler leaves what is finished before it waits for the
    reward, so that it is kept if the wait is given up.
    """

    group: Group
    index: int
    rollout_id: int
    version: int
    held_out: HeldOutSet | None = None
    begun: tuple[Sample, ...] = ()
    made: list[Sample] = field(default_factory=list, compare=False)


class Sampler(Protocol):
    """Makes samples."""

    async def make(self, asked: Asked) -> list[Sample]:
        """The samples of one response, rewards set: one, or, where a conversation is cut into several, all of them.

        ABORTED, and without a reward, if the engine was told to end it: then with the tokens that it has so far.
        """
