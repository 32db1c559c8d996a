"""What the trainer ranks ask of the rollout process, where they see that the run is to stop, and a share's way from the
rank that fetched it to the tensor-, context- and pipeline-parallel ranks that train on it too.

Invariants: rank 0 asks, and no rank acts on an answer, or on a request to stop, before all of them have it; once the
run is asked to stop nothing waits for a rollout process that is silent, nor for samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from hpcrl.config.options import Options
from hpcrl.groups import groups
from hpcrl.trainer.collectives import broadcast_json, least
from hpcrl.transport.client import Late, QueueClient, Unanswered
from hpcrl.transport.messages import UNFINISHED
from hpcrl.transport.share_format import MOST_FRAMES, Buffer, Share, decode, encode
from hpcrl.utils.waiting import Deadline

if TYPE_CHECKING:
    from hpcrl.trainer.parallel_state import Ranks

TURN = 1.0  #: seconds that all ranks wait for the rollout process before they do what else there is to do
SOON = 0.2  #: the same while something is about to be done, such as a copy in memory
#: how far a rank is with its samples: the least of all ranks decides
STOP, WAITING, THERE = range(3)
#: the call that a run that is to stop no longer repeats; an evaluation that it needs no more is answered at once
GIVEN_UP = "generate"


class StopAsked(Exception):
    """The run was asked to save and end; raised on all ranks at the same place."""


@dataclass(frozen=True)
class RolloutCalls:
    """The rollout process, as one trainer rank reaches it; every method is collective.

    Attributes:
        client: this rank's; None if it fetches nothing.
        driver: whether this is rank 0.
        group: a gloo group of all ranks.
        serve: called between two questions: sends weights to engines that want them, and completes copies; returns
            whether it wants to be called again soon.
    """

    client: QueueClient | None
    options: Options
    driver: bool
    group: dist.ProcessGroup
    serve: Callable[[], bool]

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Rank 0 asks; every rank gets the answer.  StopAsked if the run is to stop and the answer is not there."""
        answer = None
        if self.driver:
            with contextlib.suppress(Unanswered):
                answer = self.client.call(method, self.options.rollout_timeout, **params)
                if self._stop_seen and UNFINISHED in answer and method == GIVEN_UP:
                    answer = None
        answer = broadcast_json(answer, group=self.group)
        if answer is None:
            raise StopAsked
        return answer

    def wait(self, method: str, **params: object) -> dict[str, Any]:
        """As `call`, for what is answered once samples exist; these may wait for engines that wait for weights."""
        turn = TURN
        while UNFINISHED in (answer := self.call(method, patience=turn, **params)):
            turn = SOON if self.serve() else TURN
        return answer

    def fetch(self, rollout_id: int) -> Share | None:
        """This rank's samples, None if it fetches none; all ranks wait until each has its own.

        StopAsked once rank 0 sees that the run is to stop, Late after `Options.rollout_timeout`.
        """
        end = Deadline(self.options.rollout_timeout)
        fetched, turn = None, SOON
        mine = WAITING if self.client else THERE
        while True:
            try:
                if mine == WAITING:
                    fetched = self.client.fetch(rollout_id, min(end.left, turn))
                    mine = THERE
            except Late:
                if end.over:
                    raise
            everyone = least(STOP if self._stop_seen else mine, self.group)
            if everyone == STOP:
                raise StopAsked
            if everyone == THERE:
                return fetched
            turn = SOON if self.serve() else TURN

    @property
    def _stop_seen(self) -> bool:
        """Whether rank 0 knows that the run is to stop; the others learn it from what they share."""
        return self.driver and self.client.stop_seen is not None


# ---- the other ranks of a replica
# A share is encoded once in its life, by the rollout process: what is handed on are the frames as they came from the
# queue, and each peer decodes them.  Where no other rank needs it (TP = CP = PP = 1) no collective runs.

ALIGNMENT = 8  #: bytes; a frame begins at a multiple of it, so that `decode` makes views and no copies


class ShareExchange:
    """The ranks of one data-parallel rank (a model replica), which all train on the same share.

    Created once; collective over all trainer ranks.

    Attributes:
        minutes: limit of each wait for the other ranks of the replica.
    """

    def __init__(self, ranks: Ranks, minutes: float = 10.0) -> None:
        self.fetches = ranks.tp_rank == ranks.cp_rank == ranks.pp_rank == 0  #: whether this rank fetches the share
        self._source = ranks.rank
        self._group: dist.ProcessGroup | None = None
        if ranks.world == ranks.dp_size:
            return
        sizes = {"tp": ranks.tp_size, "cp": ranks.cp_size, "dp": ranks.dp_size, "pp": ranks.pp_size}
        replicas = groups(sizes, ("tp", "cp", "pp"))
        self._source = replicas[ranks.dp_rank][0]  # its first place of TP, CP and PP: the one that fetches
        # gloo: the share is in the memory of the CPU and is needed there, and NCCL would take GPU memory for its
        # buffers
        self._group, _ = dist.new_subgroups_by_enumeration(replicas, timeout=timedelta(minutes=minutes), backend="gloo")

    def exchange(self, share: Share | None) -> Share:
        """The share of this replica on each of its ranks; collective over the replica.

        Args:
            share: on the rank that fetches, what the queue delivered; ignored on the others.
        """
        if share is None or not self.fetches:
            return decode(self._receive())
        if self._group is not None:
            self._send([np.frombuffer(frame, np.uint8) for frame in share.frames or encode(share)])
        return share

    def _send(self, frames: Sequence[np.ndarray]) -> None:
        sizes = [len(frame) for frame in frames]
        dist.broadcast(torch.tensor(sizes + [-1] * (MOST_FRAMES - len(sizes))), self._source, group=self._group)
        whole = np.zeros(_starts(sizes)[-1], np.uint8)
        for start, frame in zip(_starts(sizes), frames, strict=False):
            whole[start : start + len(frame)] = frame
        dist.broadcast(torch.from_numpy(whole), self._source, group=self._group)

    def _receive(self) -> list[Buffer]:
        wanted = torch.empty(MOST_FRAMES, dtype=torch.int64)
        dist.broadcast(wanted, self._source, group=self._group)
        sizes = [size for size in wanted.tolist() if size >= 0]  # -1: no such frame
        whole = np.empty(_starts(sizes)[-1], np.uint8)
        dist.broadcast(torch.from_numpy(whole), self._source, group=self._group)
        return [memoryview(whole[start : start + size]) for start, size in zip(_starts(sizes), sizes, strict=False)]


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each frame begins in the one buffer, and, last, how long that is."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return starts
