"""How many gradings failed, and when those are too many.

Invariant: pure counting; one bad prompt never ends a run, whatever its share of a small rollout, unless the limit is 0,
or more gradings fail than the rollout has: then its groups would be made again without end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcrl.errors import CodeError, HpcrlError
from hpcrl.rollout.worker_messages import ERROR, TIMEOUT
from hpcrl.run.role import say
from hpcrl.sample import Sample


@dataclass
class Tally:
    """The failed gradings of one batch.

    Attributes:
        what: the batch, for the error.
        size: gradings of the batch.
        group_size: samples of a group.
        limit: --reward-max-failed.
        prompts: the prompts whose grading has failed in this run, shared by all its tallies.
        counted: what is counted.
    """

    what: str
    size: int
    group_size: int
    limit: float
    prompts: set[str]
    counted: str = "gradings"
    failed: int = 0
    mistakes: int = 0

    def fail(self, prompt: str, text: str, mistake: bool = False) -> None:
        """Count one.

        Args:
            mistake: as in `GradingOutcome`.

        Raises:
            HpcrlError: once they are more than the limit and come from more than one prompt, or more than the batch.
        """
        self.failed += 1
        self.mistakes += mistake
        if len(self.prompts) < 2:
            self.prompts.add(prompt)
        several = len(self.prompts) > 1 or not self.limit or self.failed > self.size
        if several and self.failed > self.limit * self.size:
            raise (CodeError if 2 * self.mistakes > self.failed else HpcrlError)(
                f"{text} ({self.failed} of the {self.size} {self.counted} of {self.what} failed, more than "
                f"--reward-max-failed {self.limit:g})",
                "the rollout's log has the tracebacks",
            )


class Tallies:
    """The failures of a run, counted by batch, and told a few of each kind, so that thousands of them leave a log that
    can be read."""

    KEPT = 8  #: batches
    TOLD = 3  #: of one text
    TEXTS = 100

    def __init__(self, limit: float, counted: str = "gradings") -> None:
        """As of `Tally`."""
        self._limit = limit
        self._counted = counted
        self._prompts: set[str] = set()
        self._tallies: dict[str, Tally] = {}
        self._told: dict[str, int] = {}

    def tally_of(self, what: str, size: int, each: int) -> Tally:
        """The count of a batch of `size` samples in groups of `each`, called `what`."""
        if what not in self._tallies:
            self._tallies = dict(list(self._tallies.items())[-self.KEPT :])
            self._tallies[what] = Tally(what, size, each, self._limit, self._prompts, self._counted)
        return self._tallies[what]

    def say(self, kind: str, text: str, trace: str = "") -> None:
        """Log a failure, unless there were enough of its kind."""
        self._told[kind] = self._told.get(kind, 0) + 1
        if self._told[kind] <= self.TOLD and len(self._told) <= self.TEXTS:
            say(text)
            if trace:
                print(trace, file=sys.stderr, flush=True)


def grading_metrics(samples: Sequence[Sample], dropped: Sequence[Sample] = ()) -> dict[str, float]:
    """reward_timeouts and reward_errors: failed gradings, also of `dropped`; reward/NAME: the mean of each part of
    the reward, if it has several."""
    found = {f"reward_{k}s": float(sum(s.grading == k for s in (*samples, *dropped))) for k in (TIMEOUT, ERROR)}
    for name in sorted({name for sample in samples for name in sample.rewards}):
        found[f"reward/{name}"] = float(np.mean([sample.rewards[name] for sample in samples if name in sample.rewards]))
    return found
