"""A worker's side of an update: pieces from the ranks become the parts that this worker holds, and go to
vLLM's loaders.

What comes over sockets comes to one worker of the host, its leader, in memory that the others map; what a trainer rank
of the same host has lies in that rank's memory.  While a round is loaded, the next one arrives.  On CPUs loaders read a
round where it lies; the owner of that memory gets DONE once they have, and what they keep was copied.

Invariant: memory in addition to the model is two rounds for each host, incomplete parts (`assembly.py`), and what vLLM
keeps of a layer until it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from hpcrl.engine.membership.broadcast import in_thread
from hpcrl.engine.pieces.assembly import Assembly, Held
from hpcrl.errors import HpcrlError
from hpcrl.weights.pieces.choose_transport import choose_transport, current_device, use_device
from hpcrl.weights.pieces.peer_transport import MessageMemory, PeerTransport, Transfer, join_group
from hpcrl.weights.pieces.piece_sender import MEMORY
from hpcrl.weights.pieces.wire import DATA, DONE, HALVES, READY, Message, ReceivePlan, WorkerJoinCommand

if TYPE_CHECKING:
    from hpcrl.engine.params.layers import Holdings

Load = Callable[[list[tuple[str, torch.Tensor]], bool], None]


class PieceReceiver:
    """One worker, member `transport.me`, of the destination host that `receive_plan` is for."""

    def __init__(self, transport: PeerTransport, receive_plan: ReceivePlan, held: Mapping[str, Held]) -> None:
        self.transport = transport
        self.receive_plan = receive_plan
        self.assembly = Assembly(receive_plan, held, transport.device, transport.may_borrow)
        self.host_leader = transport.me == receive_plan.host_leader
        self.other_workers = [w for w in receive_plan.workers if w != transport.me] if self.host_leader else []
        self.memory: MessageMemory | None = None
        self.maps: dict[int, tuple[torch.Tensor, int]] = {}
        if self.host_leader:
            far = [sum(m.nbytes for m in messages if not m.near) for messages in receive_plan.rounds]
            if half := max(far, default=0):
                self.memory = transport.allocate(half * HALVES)
                self.maps[transport.me] = self.memory.buffer, half
                transport.show(f"{MEMORY}{transport.me}", json.dumps(self.memory.to_wire() | {"half": half}))

    def receive(self, load: Load) -> None:
        """One update; load(tensors, last) is given what is complete after each round.

        Raises:
            PeerError, DeadlineError: name the member that did not take part, ValueError what is wrong with what came;
                whatever fails, this member leaves, so that no other waits for it.
        """
        try:
            with self.transport.update():
                self._receive(load)
        except BaseException:
            self.close()
            raise

    def _receive(self, load: Load) -> None:
        self.assembly.start_update()
        number = 0
        rounds = self.receive_plan.rounds or ((),)  # a worker that needs nothing has one empty round, its last
        heard: dict[int, dict[int, Transfer]] = {}
        coming: dict[int, list[Transfer]] = {}
        for turn in range(HALVES):
            heard[turn] = self._hear_of(turn)
            coming[turn] = self._expect(turn)
        for turn, messages in enumerate(rounds):
            complete: list[tuple[str, torch.Tensor]] = []
            heard[turn + HALVES] = self._hear_of(turn + HALVES)
            for transfer in coming[turn]:
                transfer.wait()
            handed = self._announce() if coming.pop(turn) else []
            ready = heard.pop(turn)
            for place, message in enumerate(messages):
                if transfer := ready.pop(self._source(message), None):
                    transfer.wait()
                complete += self.assembly.read_message(number + place, self._bytes(message))
            if not self.assembly.borrowable:
                handed += self._done_with(*messages)
            number += len(messages)
            try:
                self._load(load, complete, turn == len(rounds) - 1)
            except Exception:  # a failed load does not concern the ranks: they get every DONE before this member leaves
                with contextlib.suppress(HpcrlError):
                    self._end_round(messages, handed)
                raise
            self._end_round(messages, handed)
            coming[turn + HALVES] = self._expect(turn + HALVES)

    def _end_round(self, messages: tuple[Message, ...], handed: list[Transfer]) -> None:
        """Tell all senders that a round is read, and wait until they have received it."""
        if self.assembly.borrowable:
            handed = handed + self._done_with(*messages)
        for transfer in handed:
            transfer.wait()

    def _load(self, load: Load, complete: list[tuple[str, torch.Tensor]], last: bool) -> None:
        """Have what is complete loaded; after this the messages that it came in are not read again."""
        if last and not self.assembly.complete():
            raise ValueError("the last round has arrived, but tensors are incomplete")
        try:
            if last or complete:
                load(complete, last)
        finally:
            complete.clear()
            self.assembly.settle()

    def _done_with(self, *messages: Message) -> list[Transfer]:
        """Tell the members in whose memory messages of a round lie that these are read."""
        sources = dict.fromkeys(self._source(message) for message in messages if message.near or not self.host_leader)
        if sources:
            self.transport.settle()
        return [self.transport.tell(source, DONE) for source in sources]

    def _hear_of(self, turn: int) -> dict[int, Transfer]:
        """Begin to receive the announcements of a round that lies in memory of others, by member.

        This happens before they can be sent: what has a receive posted arrives at once; for the rest gloo asks first,
        and its thread spins until we answer.
        """
        sources = (self._source(message) for message in self._messages(turn) if message.near or not self.host_leader)
        return {source: self.transport.hear(source, READY) for source in dict.fromkeys(sources)}

    def _expect(self, turn: int) -> list[Transfer]:
        """Begin to receive what comes over sockets in a round."""
        found = [
            self.transport.receive(self._bytes(message), message.sender, DATA)
            for message in self._messages(turn)
            if self.host_leader and not message.near
        ]
        self.transport.flush()
        return found

    def _messages(self, turn: int) -> tuple[Message, ...]:
        return self.receive_plan.rounds[turn] if turn < len(self.receive_plan.rounds) else ()

    def _announce(self) -> list[Transfer]:
        """Tell the other workers of this host that the messages of a round are there."""
        self.transport.flush()
        told = [self.transport.tell(worker, READY) for worker in self.other_workers]
        return told + [self.transport.hear(worker, DONE) for worker in self.other_workers]

    def _source(self, message: Message) -> int:
        """In whose memory a message lies."""
        return message.sender if message.near else self.receive_plan.host_leader

    def _bytes(self, message: Message) -> torch.Tensor:
        owner = self._source(message)
        if owner not in self.maps:
            wire = json.loads(self.transport.read(f"{MEMORY}{owner}"))
            half = wire.pop("half")
            self.maps[owner] = self.transport.open(wire), half
        buffer, half = self.maps[owner]
        begin = message.half * half + message.offset
        if type(half) is not int or half < 0 or begin + message.nbytes > len(buffer):
            raise ValueError(f"{message.nbytes} bytes at {begin} of a memory of {len(buffer)}")
        return buffer[begin : begin + message.nbytes]

    def close(self) -> None:
        """Give up the memory, and leave the group."""
        self.maps = {}
        if self.memory is not None:
            self.memory.close()
        self.transport.close()


def join(command: WorkerJoinCommand, worker: str, held: Holdings) -> Future[PieceReceiver]:
    """Begin to join the group, in a thread of its own: a worker that waited in here would hold up those that compute
    together with it, which then never come to join.

    Args:
        worker: this one's name within its engine (`worker_name`).

    Raises:
        ValueError: if a tensor is not what the model takes, or if not all that this worker needs would come.
    """
    number, which = command.workers[worker]
    receive_plan = command.receive_plans[which]
    update_group = command.update_group
    for tensor in receive_plan.tensors:
        if held.wants(tensor.name) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{tensor.name} arrives as {tensor.dtype}{list(tensor.shape)}, the model needs "
                f"{held.wants(tensor.name)}"
            )
    if missing := held.wanted - {tensor.name for tensor in receive_plan.tensors}:
        raise ValueError(f"{len(missing)} tensors are missing from the update, the first is {min(missing)}")
    mine = {tensor.name: held.span(tensor.name, tensor.shape) for tensor in receive_plan.tensors}
    own_host = os.environ.get("VLLM_HOST_IP") or update_group.host
    device = current_device()

    def connect() -> PieceReceiver:
        with use_device(device):
            group = join_group(
                update_group.host,
                update_group.port,
                number,
                update_group.world,
                own_host,
                update_group.seconds,
            )
            transport = choose_transport(group, number, update_group, device)
            try:
                return PieceReceiver(transport, receive_plan, mine)
            except BaseException:
                transport.close()
                raise

    return in_thread(connect)
