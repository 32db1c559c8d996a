"""A worker's side of the transfer: pieces from many ranks become the parts that this worker holds, and go to vLLM's loaders.

What comes over sockets comes to one worker of the host, the porter, in memory that the others map; what a trainer rank of the same
host has lies in that rank's memory.  While a round is loaded, the next one arrives.

Invariants: everything that this worker needs comes exactly once, which is checked before anything is received; memory beside
the model is two rounds for each host, the tensors that have come in part, and what vLLM keeps of a layer until it is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpcrl.engine.key_guard import KEY_FILE
from hpcrl.engine.pieces.part_tensor import part_tensor
from hpcrl.model_files.safetensors_headers import ITEM_BYTES
from hpcrl.queue.auth import keys_in
from hpcrl.redistribution.copies import targets
from hpcrl.weights import gloo_group
from hpcrl.weights.pieces.outbox import MEMORY
from hpcrl.weights.pieces.post import Post, Transfer
from hpcrl.weights.pieces.wire import DATA, DONE, HALVES, READY, Inbox, Invitation, Message
from hpcrl.weights.shared_memory import Region, open_region

if TYPE_CHECKING:
    from hpcrl.engine.vllm_layers import Holdings

Held = tuple[Sequence[Sequence[int]], Sequence[int] | None]  #: rows (start, length), columns or None for all
Load = Callable[[list[tuple[str, torch.Tensor]], bool], None]


class Assembly:
    """The parts of tensors that have come so far.

    held: what this worker holds of each tensor that it needs, by name.  ValueError if the inbox does not bring all of it once.
    """

    def __init__(self, inbox: Inbox, held: Mapping[str, Held]) -> None:
        self.inbox, self.held = inbox, held
        self.size = {name: self._count(name, tensor.shape) for name, tensor in self._tensors().items()}
        self.missing: dict[str, int] = {}
        self.parts: dict[str, torch.Tensor] = {}
        self.most = self.bytes = 0
        self.mine: dict[int, list[tuple[int, ...]]] = {}
        coming = dict.fromkeys(self.size, 0)
        for number, message in enumerate(inbox.messages()):
            for piece in message.pieces:
                tensor = inbox.tensors[piece[0]]
                if tensor.name in self.size and (count := self._in(tensor.name, piece)):
                    coming[tensor.name] += count
                    self.mine.setdefault(number, []).append(piece)
        if wrong := [name for name, count in coming.items() if count != self.size[name]]:
            raise ValueError(f"of {wrong[0]} {coming[wrong[0]]} elements would come, this worker needs {self.size[wrong[0]]}")

    def _tensors(self) -> dict[str, Any]:
        return {t.name: t for t in self.inbox.tensors if t.name in self.held and self._count(t.name, t.shape)}

    def _count(self, name: str, shape: Sequence[int]) -> int:
        rows, columns = self.held[name]
        return sum(length for _, length in rows) * (columns[1] if columns is not None else (shape[1] if len(shape) > 1 else 1))

    def _in(self, name: str, piece: Sequence[int]) -> int:
        """How many elements of a piece this worker needs."""
        places = targets(*self.held[name], (piece[1], piece[2], piece[3], piece[4]))
        return sum((own[0].stop - own[0].start) * (own[1].stop - own[1].start) for own, _ in places)

    def begin(self) -> None:
        """A new update."""
        self.missing, self.parts, self.bytes, self.most = dict(self.size), {}, 0, 0

    def take(self, number: int, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Take message `number` out of its bytes; the tensors that are complete now, as loaders want them."""
        complete = []
        for index, top, bottom, left, right, offset in self.mine.get(number, ()):
            tensor = self.inbox.tensors[index]
            rows, columns = self.held[tensor.name]
            if tensor.name not in self.parts:
                shape = (sum(length for _, length in rows), columns[1] if columns is not None else (*tensor.shape, 1)[1])
                self.parts[tensor.name] = torch.empty(shape, dtype=getattr(torch, tensor.dtype))
                self.bytes += self.parts[tensor.name].nbytes
                self.most = max(self.most, self.bytes)
            part = self.parts[tensor.name]
            end = offset + (bottom - top) * (right - left) * ITEM_BYTES[tensor.dtype]
            piece = buffer[offset:end].view(part.dtype).view(bottom - top, right - left)
            for own, inside in targets(rows, columns, (top, bottom, left, right)):
                part[own] = piece[inside]
                self.missing[tensor.name] -= piece[inside].numel()
            if not self.missing[tensor.name]:
                done = self.parts.pop(tensor.name)
                self.bytes -= done.nbytes
                flat = done if len(tensor.shape) > 1 else done.view(-1)
                complete.append((tensor.name, part_tensor(tensor.shape, flat, rows, columns)))
        return complete

    def complete(self) -> bool:
        """Whether everything has come."""
        return not any(self.missing.values())


class InboxReader:
    """One worker, member `post.me`, of the landing whose inbox this is."""

    def __init__(self, post: Post, inbox: Inbox, held: Mapping[str, Held]) -> None:
        self.post, self.inbox, self.assembly = post, inbox, Assembly(inbox, held)
        self.porter = post.me == inbox.porter
        self.mates = [worker for worker in inbox.workers if worker != post.me] if self.porter else []
        self.memory: Region | None = None
        self.maps: dict[int, tuple[torch.Tensor, int]] = {}
        if self.porter:
            far = [sum(m.nbytes for m in messages if not m.near) for messages in inbox.rounds]
            half = max(far, default=0)
            self.memory = Region(max(1, half * HALVES))
            self.maps[post.me] = self.memory.buffer, half
            post.show(f"{MEMORY}{post.me}", json.dumps(self.memory.to_wire() | {"half": half}))

    def receive(self, load: Load) -> None:
        """One update; load(tensors, last) is given what is complete after each round.

        PeerError or DeadlineError name the member that did not take part, ValueError what is wrong with what came; whatever fails,
        this member leaves, so that nobody waits for it.
        """
        try:
            self._receive(load)
        except BaseException:
            self.close()
            raise

    def _receive(self, load: Load) -> None:
        self.assembly.begin()
        number, last = 0, len(self.inbox.rounds) - 1
        arriving = [self._expect(turn) for turn in range(min(HALVES, len(self.inbox.rounds)))]
        for turn, messages in enumerate(self.inbox.rounds):
            handed: list[Transfer] = []
            complete: list[tuple[str, torch.Tensor]] = []
            for place, message in enumerate(messages):
                if not message.near and self.porter:
                    arriving[turn % HALVES][place].wait()
                    handed += self._hand_on(message)
                else:
                    self.post.hear(self._source(message), READY).wait()
                complete += self.assembly.take(number + place, self._bytes(message))
                if message.near or not self.porter:
                    handed.append(self.post.tell(self._source(message), DONE))
            number += len(messages)
            if turn < last and complete:
                load(complete, False)
            for transfer in handed:
                transfer.wait()
            if turn + HALVES <= last:
                arriving[turn % HALVES] = self._expect(turn + HALVES)
        if not self.assembly.complete():
            raise ValueError("the last round was taken and something is missing")
        load(complete, True)

    def _expect(self, turn: int) -> dict[int, Transfer]:
        """Begin to receive what comes over sockets in a round."""
        if not self.porter:
            return {}
        return {
            place: self.post.receive(self._bytes(message), message.sender, DATA)
            for place, message in enumerate(self.inbox.rounds[turn])
            if not message.near
        }

    def _hand_on(self, message: Message) -> list[Transfer]:
        """Tell the other workers of this host that a message is there, and send it to other hosts."""
        onward = [self.post.send(self._bytes(message), porter, DATA) for porter in self.inbox.onward]
        told = [self.post.tell(mate, READY) for mate in self.mates]
        return onward + told + [self.post.hear(mate, DONE) for mate in self.mates]

    def _source(self, message: Message) -> int:
        """In whose memory a message lies."""
        return message.sender if message.near else self.inbox.porter

    def _bytes(self, message: Message) -> torch.Tensor:
        owner = self._source(message)
        if owner not in self.maps:
            wire = json.loads(self.post.read(f"{MEMORY}{owner}"))
            half = wire.pop("half")
            self.maps[owner] = open_region(wire), half
        buffer, half = self.maps[owner]
        begin = message.half * half + message.offset
        return buffer[begin : begin + message.nbytes]

    def close(self) -> None:
        """Give up the memory, and leave the group."""
        self.maps = {}
        if self.memory is not None:
            self.memory.close()
        self.post.close()


def join(invitation: Invitation, rank: str, held: Holdings) -> InboxReader:
    """Meet the others.  ValueError if a tensor is not what the model takes, or if not all that this worker needs would come."""
    number, which = invitation.workers[rank]
    inbox, meeting = invitation.inboxes[which], invitation.meeting
    for tensor in inbox.tensors:
        if held.wants(tensor.name) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{tensor.name} is to come as {tensor.dtype}{list(tensor.shape)}, the model takes {held.wants(tensor.name)}"
            )
    if missing := held.wanted - {tensor.name for tensor in inbox.tensors}:
        raise ValueError(f"{len(missing)} tensors are not to come, the first is {min(missing)}")
    shapes = {tensor.name: tensor.shape for tensor in inbox.tensors}
    pieces = held.pieces
    mine = {n: (pieces[n].rows, pieces[n].columns) if n in pieces else (((0, shapes[n][0]),), None) for n in shapes}
    keys = keys_in(Path(os.environ[KEY_FILE]).parent, 0, "weights")
    own_host = os.environ.get("VLLM_HOST_IP") or meeting.host
    group = gloo_group.join(meeting.host, meeting.port, keys, number, meeting.world, own_host, meeting.seconds)
    return InboxReader(Post(group, number, meeting.ranks, meeting.seconds), inbox, mine)
