"""A trainer rank's side of an update: its pieces, round by round, and those of ranks of other hosts that the workers of
its host read in its memory.

Invariants: a half of the message memory is packed again only when every receiver has what was in it, so memory in
addition to the weights is two rounds, at most --update-weight-buffer-size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from hpcrl.weights.pieces.choose_transport import choose_transport, current_device
from hpcrl.weights.pieces.elements import PieceValues
from hpcrl.weights.pieces.ipc_transport import ExportedMemory
from hpcrl.weights.pieces.messages import NBYTES, PackedShards, packed_shards
from hpcrl.weights.pieces.peer_transport import PeerTransport, Transfer, join_group
from hpcrl.weights.pieces.wire import DATA, DONE, HALVES, READY, UpdateGroup

MEMORY = "memory of "  #: under which a member shows where its memory is


@dataclass(frozen=True)
class SendTarget:
    """A destination host as a rank sees it: whether it can open this rank's memory (near), who takes in what comes from
    other hosts (a worker, its leader, or a rank there), and all of its workers, by member."""

    near: bool
    taker: int
    workers: tuple[int, ...]


class JoinCommand(msgspec.Struct, frozen=True):
    """The message to every rank when the members of an update form a group."""

    update_group: UpdateGroup
    names: list[str]
    dtypes: dict[str, str]
    targets: list[list[SendTarget]]
    limit: int


class PieceSender:
    """What one rank sends in every update of one plan.

    Attributes:
        own: its rows of the plan (`planning.pieces_of`).
        names: of the plan's tensors.
        limit: bytes of a half of its memory.
    """

    def __init__(
        self,
        transport: PeerTransport,
        own: np.ndarray,
        names: Sequence[str],
        targets: Sequence[SendTarget],
        limit: int,
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

    def send(self, numbers: PieceValues) -> int:
        """One update; how many bytes.

        Raises:
            PeerError, DeadlineError: name the member that did not take part.
        """
        with self.transport.update():
            return self._send(numbers)

    def _send(self, numbers: PieceValues) -> int:
        under_way: list[list[Transfer]] = [[] for _ in range(HALVES)]
        sent = 0
        for turn, found in enumerate(self.rounds):
            half = turn % HALVES
            _wait(under_way[half])
            under_way[half] = []
            # what another host's rank has for workers of this one
            taken_in = [packed for packed in found if packed.source != self.transport.me]
            landing = [self.transport.receive(self._bytes(packed), packed.source, DATA) for packed in taken_in]
            # workers of this host, each told once that its messages of the round are here
            readers: dict[int, None] = {}
            for packed in found:
                to = self.targets[packed.destination]
                if packed.source != self.transport.me:
                    readers |= dict.fromkeys(to.workers)
                    continue
                self._pack(numbers, packed)
                if to.near:
                    readers |= dict.fromkeys(to.workers)
                elif packed.nbytes:
                    under_way[half].append(self.transport.send(self._bytes(packed), to.taker, DATA))
                sent += int(packed.pieces[:, NBYTES].sum())
            self.transport.flush()
            _wait(landing)
            if readers:
                self.transport.settle()
            under_way[half] += [self.transport.tell(worker, READY) for worker in readers]
            under_way[half] += [self.transport.hear(worker, DONE) for worker in readers]
        for transfers in under_way:
            _wait(transfers)
        return sent

    def _bytes(self, packed: PackedShards) -> torch.Tensor:
        begin = packed.half * self.half + packed.offset
        return self.memory.buffer[begin : begin + packed.nbytes]

    def _pack(self, numbers: PieceValues, packed: PackedShards) -> None:
        buffer = self._bytes(packed)
        for piece, place in zip(packed.pieces.tolist(), packed.places.tolist(), strict=True):
            tensor, top, bottom, left, right, *_ = piece
            name = self.names[tensor]
            out = buffer[place : place + piece[NBYTES]].view(getattr(torch, numbers.dtypes[name]))
            numbers.write(name, (top, bottom, left, right), out.view(bottom - top, right - left))

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
    group = join_group(where.host, where.port, rank, where.world, host, where.seconds)
    transport = choose_transport(group, rank, where, current_device(), exported)
    return PieceSender(transport, pieces, command.names, command.targets[rank], command.limit)


def _wait(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()
