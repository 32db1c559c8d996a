"""A trainer rank's side of the transfer: its pieces, round by round.

Invariant: a half of the memory is packed again only when everybody has what was in it, so memory beside the weights is two
rounds, at most --update-weight-buffer-size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpcrl.weights.pieces.numbers import Numbers
from hpcrl.weights.pieces.planning import COLUMNS, Parcel, parcels
from hpcrl.weights.pieces.post import Post, Transfer
from hpcrl.weights.pieces.wire import DATA, DONE, HALVES, READY
from hpcrl.weights.shared_memory import Region

MEMORY = "memory of "  #: under which a member shows where its memory is


@dataclass(frozen=True)
class Addressee:
    """A landing as a rank sees it: whether it can open this rank's memory, its porter and all of its workers, by member."""

    near: bool
    porter: int
    workers: tuple[int, ...]


class Outbox:
    """What one rank sends in every update of one plan.

    own: its rows of the plan (`planning.pieces_of`); names: of the plan's tensors; limit: bytes of a half of its memory.
    """

    def __init__(self, post: Post, own: np.ndarray, names: Sequence[str], addressees: Sequence[Addressee], limit: int) -> None:
        self.post, self.names, self.addressees, self.limit = post, names, addressees, limit
        self.rounds = parcels(own)
        most = max((sum(parcel.nbytes for parcel in parcels) for parcels in self.rounds), default=0)
        self.half = most if len(self.rounds) > 1 else 0  # where the second half begins
        self.memory = Region(max(most * min(HALVES, max(1, len(self.rounds))), 1))
        post.show(f"{MEMORY}{post.me}", json.dumps(self.memory.to_wire() | {"half": self.half}))

    def send(self, numbers: Numbers) -> int:
        """One update; how many bytes.  PeerError or DeadlineError name the member that did not take part."""
        under_way: list[list[Transfer]] = [[] for _ in range(HALVES)]
        sent = 0
        for turn, found in enumerate(self.rounds):
            half = turn % HALVES
            _wait(under_way[half])
            under_way[half] = []
            for parcel in found:
                self._pack(numbers, parcel)
                under_way[half] += self._dispatch(parcel)
                sent += int(parcel.pieces[:, COLUMNS.index("nbytes")].sum())
        for transfers in under_way:
            _wait(transfers)
        return sent

    def _bytes(self, parcel: Parcel) -> torch.Tensor:
        begin = parcel.half * self.half + parcel.offset
        return self.memory.buffer[begin : begin + parcel.nbytes]

    def _pack(self, numbers: Numbers, parcel: Parcel) -> None:
        buffer = self._bytes(parcel)
        for (tensor, top, bottom, left, right, nbytes, *_), place in zip(
            parcel.pieces.tolist(), parcel.places.tolist(), strict=True
        ):
            name = self.names[tensor]
            out = buffer[place : place + nbytes].view(getattr(torch, numbers.dtypes[name])).view(bottom - top, right - left)
            numbers.write(name, (top, bottom, left, right), out)

    def _dispatch(self, parcel: Parcel) -> list[Transfer]:
        to = self.addressees[parcel.landing]
        if not to.near:
            return [self.post.send(self._bytes(parcel), to.porter, DATA)]
        told = [self.post.tell(worker, READY) for worker in to.workers]
        return told + [self.post.hear(worker, DONE) for worker in to.workers]

    def close(self) -> None:
        """Give up the memory, and leave the group."""
        self.memory.close()
        self.post.close()


def _wait(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
