"""What the trainer ranks ask of the rollout process, and where they see that the run is to stop.

Invariants: rank 0 asks, and no rank acts on an answer, or on a request to stop, before all of them have it; once the
run is asked to stop nothing waits for a rollout process that is silent, nor for samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcrl.config.options import Options
from hpcrl.trainer.collectives import broadcast_json, least
from hpcrl.transport.client import Late, QueueClient, Unanswered
from hpcrl.transport.messages import UNFINISHED
from hpcrl.utils.deadline import Deadline

if TYPE_CHECKING:
    import torch.distributed as dist

    from hpcrl.transport.share_format import Share

TURN = 1.0  #: seconds that all ranks wait for the rollout process before they do what else there is to do
SOON = 0.2  #: the same while something is about to be done, such as a copy in memory
#: how far a rank is with its samples: the least of all ranks decides
STOP, WAITING, THERE = range(3)
#: the call that a run that is to stop no longer repeats; an evaluation that it needs no more is answered at once
GIVEN_UP = "generate"


class StopAsked(Exception):
    """The run was asked to save and end; raised on all ranks at the same place."""


class RolloutCalls:
    """The rollout process, as one trainer rank reaches it; every method is collective.

    Attributes:
        client: this rank's; None if it fetches nothing.
        driver: whether this is rank 0.
        group: a gloo group of all ranks.
        serve: called between two questions: sends weights to engines that want them, and completes copies; returns
            whether it wants to be called again soon.
    """

    def __init__(
        self,
        client: QueueClient | None,
        options: Options,
        driver: bool,
        group: dist.ProcessGroup,
        serve: Callable[[], bool],
    ) -> None:
        self._client = client
        self._seconds = options.rollout_timeout
        self._driver = driver
        self._group = group
        self._serve = serve

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Rank 0 asks; every rank gets the answer.  StopAsked if the run is to stop and the answer is not there."""
        answer = None
        if self._driver:
            with contextlib.suppress(Unanswered):
                answer = self._client.call(method, self._seconds, **params)
                if self._stop_seen and UNFINISHED in answer and method == GIVEN_UP:
                    answer = None
        answer = broadcast_json(answer, group=self._group)
        if answer is None:
            raise StopAsked
        return answer

    def wait(self, method: str, **params: object) -> dict[str, Any]:
        """As `call`, for what is answered once samples exist; these may wait for engines that wait for weights."""
        turn = TURN
        while UNFINISHED in (answer := self.call(method, patience=turn, **params)):
            turn = SOON if self._serve() else TURN
        return answer

    def fetch(self, rollout_id: int) -> Share | None:
        """This rank's samples, None if it fetches none; all ranks wait until each has its own.

        StopAsked once rank 0 sees that the run is to stop, Late after `Options.rollout_timeout`.
        """
        end = Deadline(self._seconds)
        fetched, turn = None, SOON
        mine = WAITING if self._client else THERE
        while True:
            try:
                if mine == WAITING:
                    fetched = self._client.fetch(rollout_id, min(end.left, turn))
                    mine = THERE
            except Late:
                if end.over:
                    raise
            everyone = least(STOP if self._stop_seen else mine, self._group)
            if everyone == STOP:
                raise StopAsked
            if everyone == THERE:
                return fetched
            turn = SOON if self._serve() else TURN

    @property
    def _stop_seen(self) -> bool:
        """Whether rank 0 knows that the run is to stop; the others learn it from what they share."""
        return self._driver and self._client.stop_seen is not None
