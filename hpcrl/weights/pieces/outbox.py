"""A trainer rank's side of the transfer: its pieces, round by round.

Invariants: a half of the memory is packed again only when everybody has what was in it, so memory beside the weights is
two rounds, at most --update-weight-buffer-size; with `keep` it is also a copy of all that this rank sends, and one
piece.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hpcrl.model_files.safetensors_headers import ITEM_BYTES
from hpcrl.redistribution.rounds import padded
from hpcrl.weights.pieces.changes import letter_of, size, write
from hpcrl.weights.pieces.numbers import Numbers
from hpcrl.weights.pieces.planning import COLUMNS, Parcel, parcels
from hpcrl.weights.pieces.post import Post, Transfer
from hpcrl.weights.pieces.wire import DATA, DONE, HALVES, READY

NBYTES = COLUMNS.index("nbytes")
MEMORY = "memory of "  #: under which a member shows where its memory is


@dataclass(frozen=True)
class Addressee:
    """A landing as a rank sees it: whether it can open this rank's memory, its porter and all of its workers, by
    member."""

    near: bool
    porter: int
    workers: tuple[int, ...]


class Outbox:
    """What one rank sends in every update of one plan.

    own: its rows of the plan (`planning.pieces_of`); names: of the plan's tensors; limit: bytes of a half of its
    memory; keep: what is sent is kept, so that later updates can be of what has changed since.
    """

    def __init__(
        self,
        post: Post,
        own: np.ndarray,
        names: Sequence[str],
        addressees: Sequence[Addressee],
        limit: int,
        keep: bool = False,
    ) -> None:
        self.post = post
        self.names = names
        self.addressees = addressees
        self.limit = limit
        self.rounds = parcels(own)
        most = max((sum(parcel.nbytes for parcel in parcels) for parcels in self.rounds), default=0)
        self.half = most if len(self.rounds) > 1 else 0  # where the second half begins
        self.memory = post.room(max(most * min(HALVES, max(1, len(self.rounds))), 1))
        post.show(f"{MEMORY}{post.me}", json.dumps(self.memory.to_wire() | {"half": self.half}))
        sizes = [parcel.pieces[:, NBYTES] for found in self.rounds for parcel in found] if keep else []
        self.kept = torch.empty(sum(int(padded(found).sum()) for found in sizes), dtype=torch.uint8)
        self.piece = torch.empty(max((int(found.max()) for found in sizes), default=0), dtype=torch.uint8)
        self.keep = keep

    def send(self, numbers: Numbers, changes: bool = False) -> int:
        """One update; how many bytes.  changes: only what differs from the update before, of which nothing may have
        failed.

        PeerError or DeadlineError name the member that did not take part.
        """
        under_way: list[list[Transfer]] = [[] for _ in range(HALVES)]
        sent = kept = 0
        for turn, found in enumerate(self.rounds):
            half = turn % HALVES
            _wait(under_way[half])
            under_way[half] = []
            for parcel in found:
                letter, nbytes = (self._pack_changes if changes else self._pack)(numbers, parcel, kept)
                under_way[half] += self._dispatch(parcel, letter, nbytes)
                sent += nbytes if changes else int(parcel.pieces[:, NBYTES].sum())
                kept += parcel.nbytes
            self.post.flush()
        for transfers in under_way:
            _wait(transfers)
        return sent

    def _bytes(self, parcel: Parcel) -> torch.Tensor:
        begin = parcel.half * self.half + parcel.offset
        return self.memory.buffer[begin : begin + parcel.nbytes]

    def _pack(self, numbers: Numbers, parcel: Parcel, kept: int) -> tuple[None, int]:
        """All of a parcel; kept: where in what is kept it begins."""
        buffer = self._bytes(parcel)
        for piece, place in zip(parcel.pieces.tolist(), parcel.places.tolist(), strict=True):
            self._write(numbers, piece, buffer[place : place + piece[NBYTES]])
        if self.keep:
            self.kept[kept : kept + parcel.nbytes].copy_(buffer)
        return None, parcel.nbytes

    def _pack_changes(self, numbers: Numbers, parcel: Parcel, kept: int) -> tuple[torch.Tensor, int]:
        """(letter, bytes) of what has changed of a parcel."""
        buffer = self._bytes(parcel)
        letter = letter_of(len(parcel.pieces))
        end = 0
        for number, (piece, place) in enumerate(zip(parcel.pieces.tolist(), parcel.places.tolist(), strict=True)):
            item = ITEM_BYTES[numbers.dtypes[self.names[piece[0]]]]
            nbytes = piece[NBYTES]
            new = self.piece[:nbytes]
            old = self.kept[kept + place : kept + place + nbytes]
            self._write(numbers, piece, new)
            letter[number] = count = write(new, old, item, buffer[end:])
            end += size(count, nbytes // item, item)
        return letter, end

    def _write(self, numbers: Numbers, piece: Sequence[int], out: torch.Tensor) -> None:
        tensor, top, bottom, left, right, *_ = piece
        name = self.names[tensor]
        shaped = out.view(getattr(torch, numbers.dtypes[name])).view(bottom - top, right - left)
        numbers.write(name, (top, bottom, left, right), shaped)

    def _dispatch(self, parcel: Parcel, letter: torch.Tensor | None, nbytes: int) -> list[Transfer]:
        to = self.addressees[parcel.landing]
        if not to.near:
            announced = [self.post.tell(to.porter, READY, letter)] if letter is not None else []
            return [*announced, *([self.post.send(self._bytes(parcel)[:nbytes], to.porter, DATA)] if nbytes else [])]
        self.post.settle()
        told = [self.post.tell(worker, READY, letter) for worker in to.workers]
        return told + [self.post.hear(worker, DONE) for worker in to.workers]

    def close(self) -> None:
        """Give up the memory, and leave the group."""
        self.memory.close()
        self.post.close()


def _wait(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
