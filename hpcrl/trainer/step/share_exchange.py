"""A data-parallel rank's share, from the trainer rank that fetched it to the tensor-, context- and pipeline-parallel
ranks that train on it too.

Invariants: a share is encoded once in its life, by the rollout process: what is handed on are the frames as they came
from the queue; where no other rank needs it (TP = CP = PP = 1) nothing is handed on and no collective runs; no peer
trusts the bytes, each decodes and checks them as the first rank did.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from hpcrl.transport.share_format import MOST_FRAMES, Buffer, Share, decode, encode

if TYPE_CHECKING:
    from hpcrl.trainer.parallel_state import Ranks

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
        replicas, first = _replicas(ranks, self.fetches)
        self._source = first[ranks.dp_rank]
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


def _replicas(ranks: Ranks, fetches: bool) -> tuple[list[list[int]], list[int]]:
    """The global ranks of every data-parallel rank, and of each the one that fetches; collective over all ranks."""
    mine = torch.tensor([ranks.dp_rank, fetches], dtype=torch.int64, device=ranks.device)
    gathered = [torch.empty_like(mine) for _ in range(ranks.world)]
    dist.all_gather(gathered, mine)
    places = [tuple(place.tolist()) for place in gathered]
    replicas = [
        [rank for rank, (number, _) in enumerate(places) if number == dp_rank] for dp_rank in range(ranks.dp_size)
    ]
    return replicas, [next(rank for rank in members if places[rank][1]) for members in replicas]
