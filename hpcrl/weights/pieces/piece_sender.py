"""A trainer rank's side of an update: its pieces, round by round, and those of ranks of other hosts that the workers of
its host read in its memory.

Invariants: a half of the message memory is packed again only when every receiver has what was in it, so memory in
addition to the weights is two rounds, at most --update-weight-buffer-size; with `keep` it is also a copy of all that
this rank sends, and one piece.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import torch

from hpcrl.models.files.safetensors_files import ITEM_BYTES
from hpcrl.weights import gloo_group
from hpcrl.weights.pieces.choose_transport import choose_transport, current_device
from hpcrl.weights.pieces.elements import change_counts, size, write
from hpcrl.weights.pieces.ipc_transport import ExportedMemory
from hpcrl.weights.pieces.messages import NBYTES, PackedShards, packed_shards
from hpcrl.weights.pieces.peer_transport import PeerTransport, Transfer
from hpcrl.weights.pieces.wire import DATA, DONE, HALVES, READY, UpdateGroup
from hpcrl.weights.redistribution.layouts import Rectangle
from hpcrl.weights.redistribution.loads import padded

MEMORY = "memory of "  #: under which a member shows where its memory is


@dataclass(frozen=True)
class SendTarget:
    """A destination host as a rank sees it: whether it can open this rank's memory (near), who takes in what comes from
    other hosts (a worker, its leader, or a rank there), and all of its workers, by member."""

    near: bool
    taker: int
    workers: tuple[int, ...]


class JoinCommand(msgspec.Struct, frozen=True):
    """What every rank is told when the members of an update form a group."""

    update_group: UpdateGroup
    names: list[str]
    dtypes: dict[str, str]
    targets: list[list[SendTarget]]
    limit: int
    keep: bool


class Values(Protocol):
    """What a rank can send: of tensors, by name, in the dtypes that are wanted."""

    @property
    def dtypes(self) -> Mapping[str, str]: ...

    def write(self, name: str, area: Rectangle, out: torch.Tensor) -> None:
        """The rectangle of a tensor into `out` (of its shape, in the wanted dtype)."""


class PieceSender:
    """What one rank sends in every update of one plan.

    Attributes:
        own: its rows of the plan (`planning.pieces_of`).
        names: of the plan's tensors.
        limit: bytes of a half of its memory.
        keep: what is sent is kept, so that later updates can be of what has changed since.
    """

    def __init__(
        self,
        transport: PeerTransport,
        own: np.ndarray,
        names: Sequence[str],
        targets: Sequence[SendTarget],
        limit: int,
        keep: bool = False,
    ) -> None:
        self.transport = transport
        self.names = names
        self.targets = targets
        self.limit = limit
        self.rounds = packed_shards(own)
        most = max((sum(packed.nbytes for packed in found) for found in self.rounds), default=0)
        self.half = most if len(self.rounds) > 1 else 0  # where the second half begins
        self.memory = transport.allocate(max(most * min(HALVES, max(1, len(self.rounds))), 1))
        transport.show(f"{MEMORY}{transport.me}", json.dumps(self.memory.to_wire() | {"half": self.half}))
        sizes = [packed.pieces[:, NBYTES] for found in self.rounds for packed in found] if keep else []
        self.kept = torch.empty(sum(int(padded(found).sum()) for found in sizes), dtype=torch.uint8)
        self.piece = torch.empty(max((int(found.max()) for found in sizes), default=0), dtype=torch.uint8)
        self.keep = keep
        self.staged = False

    def stage(self, numbers: Values) -> bool:
        """Pack all of an update before engines wait for it, if it is one round; whether it was packed."""
        self.staged = False
        if len(self.rounds) != 1:
            return False
        kept = 0
        for packed in self.rounds[0]:
            self._pack(numbers, packed, kept)
            kept += packed.nbytes
        self.staged = True
        return True

    def send(self, numbers: Values, changes: bool = False) -> int:
        """One update; how many bytes.

        Args:
            changes: only what differs from the update before, of which nothing may have failed.

        Raises:
            PeerError, DeadlineError: name the member that did not take part.
        """
        with self.transport.update():
            return self._send(numbers, changes)

    def _send(self, numbers: Values, changes: bool) -> int:
        under_way: list[list[Transfer]] = [[] for _ in range(HALVES)]
        sent = kept = 0
        for turn, found in enumerate(self.rounds):
            half = turn % HALVES
            _wait(under_way[half])
            under_way[half] = []
            landing = [(packed, self._take_in(packed)) for packed in found if packed.source != self.transport.me]
            for packed in found:
                if packed.source != self.transport.me:
                    continue
                counts, nbytes = None, packed.nbytes
                if not self.staged:
                    counts, nbytes = (self._pack_changes if changes else self._pack)(numbers, packed, kept)
                under_way[half] += self._dispatch(packed, counts, nbytes)
                sent += nbytes if changes else int(packed.pieces[:, NBYTES].sum())
                kept += packed.nbytes
            self.transport.flush()
            for packed, arriving in landing:
                arriving.wait()
                under_way[half] += self._announce(packed, None)
        for transfers in under_way:
            _wait(transfers)
        self.staged = False
        return sent

    def _bytes(self, packed: PackedShards) -> torch.Tensor:
        begin = packed.half * self.half + packed.offset
        return self.memory.buffer[begin : begin + packed.nbytes]

    def _pack(self, numbers: Values, packed: PackedShards, kept: int) -> tuple[None, int]:
        """All of it.

        Args:
            kept: where in what is kept it begins.
        """
        buffer = self._bytes(packed)
        for piece, place in zip(packed.pieces.tolist(), packed.places.tolist(), strict=True):
            self._write(numbers, piece, buffer[place : place + piece[NBYTES]])
        if self.keep:
            self.kept[kept : kept + packed.nbytes].copy_(buffer)
        return None, packed.nbytes

    def _pack_changes(self, numbers: Values, packed: PackedShards, kept: int) -> tuple[torch.Tensor, int]:
        """(change counts, bytes) of what has changed."""
        buffer = self._bytes(packed)
        counts = change_counts(len(packed.pieces))
        end = 0
        for number, (piece, place) in enumerate(zip(packed.pieces.tolist(), packed.places.tolist(), strict=True)):
            item = ITEM_BYTES[numbers.dtypes[self.names[piece[0]]]]
            nbytes = piece[NBYTES]
            new = self.piece[:nbytes]
            old = self.kept[kept + place : kept + place + nbytes]
            self._write(numbers, piece, new)
            counts[number] = count = write(new, old, item, buffer[end:])
            end += size(count, nbytes // item, item)
        return counts, end

    def _write(self, numbers: Values, piece: Sequence[int], out: torch.Tensor) -> None:
        tensor, top, bottom, left, right, *_ = piece
        name = self.names[tensor]
        shaped = out.view(getattr(torch, numbers.dtypes[name])).view(bottom - top, right - left)
        numbers.write(name, (top, bottom, left, right), shaped)

    def _dispatch(self, packed: PackedShards, counts: torch.Tensor | None, nbytes: int) -> list[Transfer]:
        to = self.targets[packed.destination]
        if not to.near:
            announced = [self.transport.tell(to.taker, READY, counts)] if counts is not None else []
            return [
                *announced,
                *([self.transport.send(self._bytes(packed)[:nbytes], to.taker, DATA)] if nbytes else []),
            ]
        self.transport.settle()
        return self._announce(packed, counts)

    def _take_in(self, packed: PackedShards) -> Transfer:
        """Begin to receive what another host's rank has for workers of this one."""
        return self.transport.receive(self._bytes(packed), packed.source, DATA)

    def _announce(self, packed: PackedShards, counts: torch.Tensor | None) -> list[Transfer]:
        """Tell the workers of this host that a message is in this rank's memory; it is read once all have answered."""
        to = self.targets[packed.destination]
        told = [self.transport.tell(worker, READY, counts) for worker in to.workers]
        return told + [self.transport.hear(worker, DONE) for worker in to.workers]

    def close(self) -> None:
        """Give up the memory, and leave the group."""
        self.memory.close()
        self.transport.close()


def join_as_rank(
    command: JoinCommand,
    pieces: np.ndarray,
    rank: int,
    host: str,
    exported: ExportedMemory | None = None,
) -> PieceSender:
    """Join the group of an update, as one of its ranks.

    Args:
        pieces: this rank's (`messages.pieces_of`).
        host: this rank's own address.
        exported: memory on the GPU of the weights that engines open, where they do.
    """
    where = command.update_group
    group = gloo_group.join(where.host, where.port, rank, where.world, host, where.seconds)
    transport = choose_transport(group, rank, where, current_device(), exported)
    return PieceSender(transport, pieces, command.names, command.targets[rank], command.limit, command.keep)


def _wait(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
