"""The parts of tensors that one worker holds, put together from messages.

A part of a matrix that comes whole in one round may stay where it is, in memory of another process: loaders then copy
it straight into their parameters (`borrowed_view.py`).

Invariants: everything that this worker needs comes exactly once, which is checked before anything is received; parts
that are not complete take memory in addition to the model; after `settle` no tensor that was handed out reads a
message's memory.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hpcrl.engine.pieces.borrowed_view import BorrowedPart, BorrowedView
from hpcrl.engine.pieces.part_tensor import part_tensor
from hpcrl.models.files.safetensors_files import ITEM_BYTES
from hpcrl.weights.pieces.elements import copy
from hpcrl.weights.pieces.wire import ReceivePlan, WireTensor
from hpcrl.weights.redistribution.layouts import targets

HOST = torch.device("cpu")
Held = tuple[Sequence[Sequence[int]], Sequence[int] | None]  #: rows (start, length), columns or None for all


class PartMemory:
    """Memory for parts; the host's is used again once no one holds a tensor in it: a new page costs more than to fill
    it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free: dict[int, list[np.ndarray]] = {}

    def allocate(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], of whatever values."""
        if self.device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)  # torch itself keeps what was given back
        free = self.free.setdefault(nbytes, [])
        block = free.pop() if free else np.empty(nbytes, dtype=np.uint8)
        lease = block[:]  # lives as long as the last tensor over it
        weakref.finalize(lease, free.append, block)
        return torch.from_numpy(lease)


class Assembly:
    """The parts of tensors that have come so far.

    Attributes:
        held: what this worker holds of each tensor that it needs, by name.
        device: where messages and parts are.
        borrow: parts may stay in the messages' memory until `settle`.

    Raises:
        ValueError: if `receive_plan` does not bring all of it once.
    """

    def __init__(
        self,
        receive_plan: ReceivePlan,
        held: Mapping[str, Held],
        device: torch.device = HOST,
        borrow: bool = False,
    ) -> None:
        self.receive_plan = receive_plan
        self.held = held
        self.size = {t.name: n for t in receive_plan.tensors if t.name in held and (n := self._count(t.name, t.shape))}
        self.missing: dict[str, int] = {}
        self.parts: dict[str, torch.Tensor] = {}
        self.borrowed: dict[str, BorrowedPart] = {}  #: of this round, not complete
        self.handed_out: list[weakref.ref[BorrowedPart]] = []
        self.most = self.bytes = 0
        self.memory = PartMemory(device)
        self.mine: dict[int, list[tuple[int, tuple[int, ...]]]] = {}  # of each message (our elements, piece)
        coming = dict.fromkeys(self.size, 0)
        for number, message in enumerate(receive_plan.messages()):
            for piece in message.pieces:
                tensor = receive_plan.tensors[piece[0]]
                if tensor.name in self.size and (count := self._in(tensor.name, piece)):
                    coming[tensor.name] += count
                    self.mine.setdefault(number, []).append((count, piece))
        if wrong := [name for name, count in coming.items() if count != self.size[name]]:
            raise ValueError(
                f"{wrong[0]}: the update brings {coming[wrong[0]]} elements, this worker needs {self.size[wrong[0]]}"
            )
        self.borrowable = self._of_one_round() if borrow else frozenset()

    def _of_one_round(self) -> frozenset[str]:
        """The matrices whose parts for this worker all come in one round."""
        rounds: dict[int, set[int]] = {}
        number = 0
        for turn, messages in enumerate(self.receive_plan.rounds):
            for which in range(number, number + len(messages)):
                for _, piece in self.mine.get(which, ()):
                    rounds.setdefault(piece[0], set()).add(turn)
            number += len(messages)
        tensors = self.receive_plan.tensors
        return frozenset(
            tensors[index].name for index, turns in rounds.items() if len(turns) == 1 and len(tensors[index].shape) == 2
        )

    def _count(self, name: str, shape: Sequence[int]) -> int:
        rows, columns = self.held[name]
        return sum(length for _, length in rows) * (columns[1] if columns is not None else math.prod(shape[1:]))

    def _in(self, name: str, piece: Sequence[int]) -> int:
        """How many elements of a piece this worker needs."""
        places = targets(*self.held[name], (piece[1], piece[2], piece[3], piece[4]))
        return sum((own[0].stop - own[0].start) * (own[1].stop - own[1].start) for own, _ in places)

    def start_update(self) -> None:
        """A new update."""
        self.missing = dict(self.size)
        self.borrowed = {}
        self.handed_out = []
        self.parts = {}
        self.bytes = 0
        self.most = 0

    def read_message(self, number: int, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Take message `number` out of its bytes; the tensors that are complete now, as loaders want them."""
        complete = []
        for ours, (index, top, bottom, left, right, offset) in self.mine.get(number, ()):
            tensor = self.receive_plan.tensors[index]
            end = offset + (bottom - top) * (right - left) * ITEM_BYTES[tensor.dtype]
            piece = buffer[offset:end].view(getattr(torch, tensor.dtype)).view(bottom - top, right - left)
            self._put(tensor, (top, bottom, left, right), piece)
            self.missing[tensor.name] -= ours
            if not self.missing[tensor.name]:
                complete.append((tensor.name, self._done(tensor)))
        return complete

    def _put(self, tensor: WireTensor, area: tuple[int, int, int, int], piece: torch.Tensor) -> None:
        """Take a piece, or note where it lies."""
        if tensor.name not in self.borrowable:
            part = self._part(tensor)
            for own, inside in targets(*self.held[tensor.name], area):
                copy(part[own], piece[inside])
            return
        if tensor.name not in self.borrowed:
            self.borrowed[tensor.name] = BorrowedPart(self._shape(tensor), piece.dtype, self.memory.allocate)
        for own, inside in targets(*self.held[tensor.name], area):
            self.borrowed[tensor.name].add(own, piece[inside])

    def _shape(self, tensor: WireTensor) -> tuple[int, int]:
        """Of this worker's part: a vector has one column."""
        rows, columns = self.held[tensor.name]
        return sum(length for _, length in rows), columns[1] if columns is not None else math.prod(tensor.shape[1:])

    def _part(self, tensor: WireTensor) -> torch.Tensor:
        """What has come of a tensor: [rows, columns]."""
        if tensor.name not in self.parts:
            shape = self._shape(tensor)
            nbytes = shape[0] * shape[1] * ITEM_BYTES[tensor.dtype]
            self.parts[tensor.name] = self.memory.allocate(nbytes).view(getattr(torch, tensor.dtype)).view(shape)
            self.bytes += nbytes
            self.most = max(self.most, self.bytes)
        return self.parts[tensor.name]

    def _done(self, tensor: WireTensor) -> torch.Tensor:
        """A complete tensor, as loaders want it: a view of borrowed memory, or theirs alone."""
        if (borrowed := self.borrowed.pop(tensor.name, None)) is not None:
            self.handed_out.append(weakref.ref(borrowed))
            return part_tensor(tensor.shape, BorrowedView(borrowed), *self.held[tensor.name])
        found = self.parts.pop(tensor.name)
        self.bytes -= found.nbytes
        part = found if len(tensor.shape) == 2 else found.view(len(found), *tensor.shape[1:])
        return part_tensor(tensor.shape, part, *self.held[tensor.name])

    def settle(self) -> None:
        """What loaders have kept of a round, for a layer that is not complete, gets memory of its own."""
        for found in self.handed_out:
            if (borrowed := found()) is not None:
                borrowed.settle()
        self.handed_out = []

    def complete(self) -> bool:
        """Whether everything has come."""
        return not any(self.missing.values())
