"""The parts of tensors that one worker holds, put together out of messages.

A part of a matrix of which all comes in one round may stay where it is, in memory of others: loaders then copy it
straight into their parameters (`lent_tensor.py`).

Invariants: everything that this worker needs comes exactly once, which is checked before anything is received; parts
that are not complete are memory beside the model, and so are, with `keep`, all parts: the host's, from one update to
the next; after `settle` nothing that was handed out reads a message's memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from hpcrl.engine.pieces.lent_tensor import LentTensor, Loan
from hpcrl.engine.pieces.part_tensor import part_tensor
from hpcrl.model_files.safetensors_headers import ITEM_BYTES
from hpcrl.redistribution.copies import targets
from hpcrl.weights.digest import digest
from hpcrl.weights.pieces.bits import copy, words
from hpcrl.weights.pieces.changes import WHOLE, read, size
from hpcrl.weights.pieces.wire import Inbox, Message, Tensor

HOST = torch.device("cpu")
Held = tuple[Sequence[Sequence[int]], Sequence[int] | None]  #: rows (start, length), columns or None for all


class Room:
    """Memory for parts; the host's is used again once nobody holds a tensor in it: a new page costs more than to fill
    it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free: dict[int, list[np.ndarray]] = {}

    def take(self, nbytes: int) -> torch.Tensor:
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

    held: what this worker holds of each tensor that it needs, by name; keep: parts stay from update to update;
    device: where messages and parts are; lend: parts may stay in the messages' memory until `settle`.  ValueError if
    the inbox does not bring all of it once.
    """

    def __init__(
        self,
        inbox: Inbox,
        held: Mapping[str, Held],
        keep: bool = False,
        device: torch.device = HOST,
        lend: bool = False,
    ) -> None:
        self.inbox = inbox
        self.held = held
        self.keep = keep
        self.size = {name: self._count(name, tensor.shape) for name, tensor in self._tensors().items()}
        self.missing: dict[str, int] = {}
        self.parts: dict[str, torch.Tensor] = {}
        self.loans: dict[str, Loan] = {}  #: of this round, not complete
        self.lent: list[weakref.ref[Loan]] = []
        self.most = self.bytes = 0
        self.room = Room(device)
        self.current = False  #: all parts are those of the last update
        self.messages = list(inbox.messages())
        self.mine: dict[
            int, list[tuple[int, int, tuple[int, ...]]]
        ] = {}  # of each message (which of its pieces, our elements, piece)
        coming = dict.fromkeys(self.size, 0)
        for number, message in enumerate(self.messages):
            for which, piece in enumerate(message.pieces):
                tensor = inbox.tensors[piece[0]]
                if tensor.name in self.size and (count := self._in(tensor.name, piece)):
                    coming[tensor.name] += count
                    self.mine.setdefault(number, []).append((which, count, piece))
        if wrong := [name for name, count in coming.items() if count != self.size[name]]:
            raise ValueError(
                f"of {wrong[0]} {coming[wrong[0]]} elements would come, this worker needs {self.size[wrong[0]]}"
            )
        self.lendable = self._of_one_round() if lend and not keep else frozenset()

    def _of_one_round(self) -> frozenset[str]:
        """The matrices of which all that this worker needs comes in one round."""
        rounds: dict[int, set[int]] = {}
        number = 0
        for turn, messages in enumerate(self.inbox.rounds):
            for which in range(number, number + len(messages)):
                for _, _, piece in self.mine.get(which, ()):
                    rounds.setdefault(piece[0], set()).add(turn)
            number += len(messages)
        tensors = self.inbox.tensors
        return frozenset(
            tensors[index].name for index, turns in rounds.items() if len(turns) == 1 and len(tensors[index].shape) > 1
        )

    def _tensors(self) -> dict[str, Any]:
        return {t.name: t for t in self.inbox.tensors if t.name in self.held and self._count(t.name, t.shape)}

    def _count(self, name: str, shape: Sequence[int]) -> int:
        rows, columns = self.held[name]
        return sum(length for _, length in rows) * (
            columns[1] if columns is not None else (shape[1] if len(shape) > 1 else 1)
        )

    def _in(self, name: str, piece: Sequence[int]) -> int:
        """How many elements of a piece this worker needs."""
        places = targets(*self.held[name], (piece[1], piece[2], piece[3], piece[4]))
        return sum((own[0].stop - own[0].start) * (own[1].stop - own[1].start) for own, _ in places)

    def begin(self) -> None:
        """A new update."""
        self.missing = dict(self.size)
        self.current = False
        self.loans = {}
        self.lent = []
        if not self.keep:
            self.parts = {}
            self.bytes = 0
            self.most = 0

    def take(
        self, number: int, buffer: torch.Tensor, letter: torch.Tensor | None = None
    ) -> list[tuple[str, torch.Tensor]]:
        """Take message `number` out of its bytes; the tensors that are complete now, as loaders want them.

        letter: of a message that brings what has changed (`hpcrl.weights.pieces.changes`).  ValueError for one that
        cannot be.
        """
        complete, places = [], self._places(number, letter)
        for which, ours, (index, top, bottom, left, right, offset) in self.mine.get(number, ()):
            tensor = self.inbox.tensors[index]
            area = (top, bottom, left, right)
            if letter is not None and (count := int(letter[which])) != WHOLE:
                self._change(tensor, area, buffer[places[which] :], count)
            else:
                begin = offset if letter is None else places[which]
                end = begin + (bottom - top) * (right - left) * ITEM_BYTES[tensor.dtype]
                piece = buffer[begin:end].view(getattr(torch, tensor.dtype)).view(bottom - top, right - left)
                self._put(tensor, area, piece)
            self.missing[tensor.name] -= ours
            if not self.missing[tensor.name]:
                complete.append((tensor.name, self._done(tensor)))
        return complete

    def _places(self, number: int, letter: torch.Tensor | None) -> list[int]:
        """Where each piece of a message with a letter begins."""
        if letter is None:
            return []
        return [0, *accumulate(sizes(self.inbox, self.messages[number], letter))]

    def _put(self, tensor: Tensor, area: tuple[int, int, int, int], piece: torch.Tensor) -> None:
        """Take a piece, or note where it lies."""
        if tensor.name not in self.lendable:
            part = self._part(tensor)
            for own, inside in targets(*self.held[tensor.name], area):
                copy(part[own], piece[inside])
            return
        if tensor.name not in self.loans:
            self.loans[tensor.name] = Loan(self._shape(tensor), piece.dtype, self.room.take)
        for own, inside in targets(*self.held[tensor.name], area):
            self.loans[tensor.name].add(own, piece[inside])

    def _shape(self, tensor: Tensor) -> tuple[int, int]:
        """Of this worker's part: a vector has one column."""
        rows, columns = self.held[tensor.name]
        return sum(length for _, length in rows), columns[1] if columns is not None else (*tensor.shape, 1)[1]

    def _part(self, tensor: Tensor) -> torch.Tensor:
        """What has come of a tensor: [rows, columns]."""
        if tensor.name not in self.parts:
            shape = self._shape(tensor)
            nbytes = shape[0] * shape[1] * ITEM_BYTES[tensor.dtype]
            self.parts[tensor.name] = self.room.take(nbytes).view(getattr(torch, tensor.dtype)).view(shape)
            self.bytes += nbytes
            self.most = max(self.most, self.bytes)
        return self.parts[tensor.name]

    def _change(self, tensor: Tensor, area: tuple[int, int, int, int], buffer: torch.Tensor, count: int) -> None:
        """Put in what has changed of a piece."""
        if not count:
            return
        top, bottom, left, right = area
        width, item = right - left, ITEM_BYTES[tensor.dtype]
        at, values = read(buffer, count, (bottom - top) * width, item)
        row = at // width
        column = at % width
        part = words(self.parts[tensor.name])
        for own, inside in targets(*self.held[tensor.name], area):
            (first, last), (begin, end) = ((one.start, one.stop) for one in inside)
            mine = (row >= first) & (row < last) & (column >= begin) & (column < end)
            part[own][row[mine] - first, column[mine] - begin] = values[mine]

    def _done(self, tensor: Tensor) -> torch.Tensor:
        """A complete tensor, as loaders want it; it is lent, kept or theirs."""
        if (loan := self.loans.pop(tensor.name, None)) is not None:
            self.lent.append(weakref.ref(loan))
            return part_tensor(tensor.shape, LentTensor(loan), *self.held[tensor.name])
        found = self.parts[tensor.name]
        if not self.keep:
            del self.parts[tensor.name]
            self.bytes -= found.nbytes
        return part_tensor(tensor.shape, found if len(tensor.shape) > 1 else found.view(-1), *self.held[tensor.name])

    def settle(self) -> None:
        """What loaders have kept of a round, for a layer that is not complete, gets memory of its own."""
        for found in self.lent:
            if (loan := found()) is not None:
                loan.settle()
        self.lent = []

    def complete(self) -> bool:
        """Whether everything has come."""
        return not any(self.missing.values())

    def digests(self) -> dict[str, str]:
        """Of every part that is kept, by name."""
        shapes = {tensor.name: tensor.shape for tensor in self.inbox.tensors}
        return {name: digest(part if len(shapes[name]) > 1 else part.view(-1)) for name, part in self.parts.items()}


def sizes(inbox: Inbox, message: Message, letter: torch.Tensor) -> list[int]:
    """Bytes of each piece of a message with a letter."""
    found = []
    for (index, top, bottom, left, right, _), count in zip(message.pieces, letter.tolist(), strict=True):
        found.append(size(count, (bottom - top) * (right - left), ITEM_BYTES[inbox.tensors[index].dtype]))
    return found
