"""A worker's side of the transfer: pieces from many ranks become the parts that this worker holds, and go to vLLM's
loaders.

What comes over sockets comes to one worker of the host, the porter, in memory that the others map; what a trainer rank
of the same host has lies in that rank's memory.  While a round is loaded, the next one arrives.  In memory of the host
loaders read a round where it lies; whose memory it is hears DONE once they have, and what they keep was copied.

Invariant: memory beside the model is two rounds for each host, what has come in part (`assembly.py`), and what vLLM
keeps of a layer until it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpcrl.engine.key_guard import KEY_FILE
from hpcrl.engine.pieces.assembly import Assembly, Held, sizes
from hpcrl.errors import HpcrlError
from hpcrl.queue.auth import keys_in
from hpcrl.weights import gloo_group
from hpcrl.weights.pieces.changes import WHOLE
from hpcrl.weights.pieces.outbox import MEMORY
from hpcrl.weights.pieces.post import Post, Room, Transfer
from hpcrl.weights.pieces.posts import post_of
from hpcrl.weights.pieces.wire import DATA, DONE, HALVES, READY, Inbox, Invitation, Message

if TYPE_CHECKING:
    from hpcrl.engine.vllm_layers import Holdings

Load = Callable[[list[tuple[str, torch.Tensor]], bool], None]


class InboxReader:
    """One worker, member `post.me`, of the landing whose inbox this is."""

    def __init__(self, post: Post, inbox: Inbox, held: Mapping[str, Held], keep: bool = False) -> None:
        self.post = post
        self.inbox = inbox
        self.assembly = Assembly(inbox, held, keep, post.device, post.lends)
        self.porter = post.me == inbox.porter
        self.mates = [worker for worker in inbox.workers if worker != post.me] if self.porter else []
        self.memory: Room | None = None
        self.maps: dict[int, tuple[torch.Tensor, int]] = {}
        if self.porter:
            far = [sum(m.nbytes for m in messages if not m.near) for messages in inbox.rounds]
            if half := max(far, default=0):
                self.memory = post.room(half * HALVES)
                self.maps[post.me] = self.memory.buffer, half
                post.show(f"{MEMORY}{post.me}", json.dumps(self.memory.to_wire() | {"half": half}))

    def receive(self, load: Load, changes: bool = False) -> None:
        """One update; load(tensors, last) is given what is complete after each round; changes: it brings what differs
        from the last.

        PeerError or DeadlineError name the member that did not take part, ValueError what is wrong with what came;
        whatever fails, this member leaves, so that nobody waits for it.
        """
        try:
            self._receive(load, changes)
        except BaseException:
            self.close()
            raise

    def _receive(self, load: Load, changes: bool) -> None:
        if changes and not self.assembly.current:
            raise ValueError("changes were to come, and this worker has not kept what they change")
        self.assembly.begin()
        # of nothing the last comes at once
        number = 0
        rounds = self.inbox.rounds or ((),)
        arriving: dict[tuple[int, int], Transfer] = {}
        for turn in range(HALVES):
            arriving |= self._hear_of(turn, changes) | self._expect(turn, changes)
        for turn, messages in enumerate(rounds):
            handed: list[Transfer] = []
            complete: list[tuple[str, torch.Tensor]] = []
            arriving |= self._hear_of(turn + HALVES, changes)
            for place, message in enumerate(messages):
                transfer = arriving.pop((turn, place))
                if not message.near and self.porter:
                    letter = self._arrived(message, transfer, changes)
                    handed += self._hand_on(message, letter)
                else:
                    heard = transfer.wait()
                    letter = self._letter(message, heard) if changes else None
                complete += self.assembly.take(number + place, self._bytes(message), letter)
                if not self.assembly.lendable:
                    handed += self._done_with(message)
            number += len(messages)
            try:
                self._load(load, complete, turn == len(rounds) - 1)
            except (
                Exception
            ):  # that a load failed is not the ranks' matter: they have heard all before this member leaves
                with contextlib.suppress(HpcrlError):
                    self._end_round(messages, handed)
                raise
            self._end_round(messages, handed)
            arriving |= self._expect(turn + HALVES, changes)
        self.assembly.current = self.assembly.keep

    def _end_round(self, messages: tuple[Message, ...], handed: list[Transfer]) -> None:
        """Have all hear that a round is read, and wait until they have."""
        if self.assembly.lendable:
            handed = handed + self._done_with(*messages)
        for transfer in handed:
            transfer.wait()

    def _load(self, load: Load, complete: list[tuple[str, torch.Tensor]], last: bool) -> None:
        """Have what is complete loaded; after this the messages that it came in are not read again."""
        if last and not self.assembly.complete():
            raise ValueError("the last round was taken and something is missing")
        try:
            if last or complete:
                load(complete, last)
        finally:
            complete.clear()
            self.assembly.settle()

    def _done_with(self, *messages: Message) -> list[Transfer]:
        """Tell those in whose memory messages lie that they are read."""
        sources = [self._source(message) for message in messages if message.near or not self.porter]
        if sources:
            self.post.settle()
        return [self.post.tell(source, DONE) for source in sources]

    def _hear_of(self, turn: int, changes: bool) -> dict[tuple[int, int], Transfer]:
        """Begin to hear of what a round brings into memory of others, by its place: a word, or the letter of what has
        changed.

        Before it can be sent: what is waited for comes at once; of what is not gloo asks first, and while we answer its
        thread spins.
        """
        return {
            (turn, place): self.post.hear(self._source(message), READY, len(message.pieces) if changes else 0)
            for place, message in enumerate(self._messages(turn))
            if message.near or not self.porter
        }

    def _expect(self, turn: int, changes: bool) -> dict[tuple[int, int], Transfer]:
        """Begin to receive what comes over sockets in a round: its bytes, or of changes the letters, which say how many
        bytes follow."""
        found = {
            (turn, place): self.post.hear(message.sender, READY, len(message.pieces))
            if changes
            else self.post.receive(self._bytes(message), message.sender, DATA)
            for place, message in enumerate(self._messages(turn))
            if self.porter and not message.near
        }
        self.post.flush()
        return found

    def _messages(self, turn: int) -> tuple[Message, ...]:
        return self.inbox.rounds[turn] if turn < len(self.inbox.rounds) else ()

    def _arrived(self, message: Message, arriving: Transfer, changes: bool) -> torch.Tensor | None:
        """Wait for a message that comes over sockets; its letter, if it brings changes."""
        found = arriving.wait()
        if not changes:
            return None
        letter = self._letter(message, found)
        if nbytes := sum(sizes(self.inbox, message, letter)):
            self.post.receive(self._bytes(message)[:nbytes], message.sender, DATA).wait()
        return letter

    def _letter(self, message: Message, found: torch.Tensor) -> torch.Tensor:
        """What was heard, checked.  ValueError if more would come than there is room for."""
        letter = found.view(torch.int32)
        if int(letter.min()) < WHOLE or sum(sizes(self.inbox, message, letter)) > message.nbytes:
            raise ValueError(f"more changes of {len(message.pieces)} pieces are to come than there is room for")
        return letter

    def _hand_on(self, message: Message, letter: torch.Tensor | None) -> list[Transfer]:
        """Tell the other workers of this host that a message is there, and send it to other hosts."""
        content = self._bytes(message)
        if letter is not None:
            content = content[: sum(sizes(self.inbox, message, letter))]
        onward = [self.post.tell(porter, READY, letter) for porter in self.inbox.onward if letter is not None]
        onward += [self.post.send(content, porter, DATA) for porter in self.inbox.onward if len(content)]
        self.post.flush()
        told = [self.post.tell(mate, READY, letter) for mate in self.mates]
        return onward + told + [self.post.hear(mate, DONE) for mate in self.mates]

    def _source(self, message: Message) -> int:
        """In whose memory a message lies."""
        return message.sender if message.near else self.inbox.porter

    def _bytes(self, message: Message) -> torch.Tensor:
        owner = self._source(message)
        if owner not in self.maps:
            wire = json.loads(self.post.read(f"{MEMORY}{owner}"))
            half = wire.pop("half")
            self.maps[owner] = self.post.open(wire), half
        buffer, half = self.maps[owner]
        begin = message.half * half + message.offset
        if begin + message.nbytes > len(buffer):
            raise ValueError(f"{message.nbytes} bytes at {begin} of a memory of {len(buffer)}")
        return buffer[begin : begin + message.nbytes]

    def close(self) -> None:
        """Give up the memory, and leave the group."""
        self.maps = {}
        if self.memory is not None:
            self.memory.close()
        self.post.close()


def join(invitation: Invitation, rank: str, held: Holdings) -> InboxReader:
    """Meet the others.  ValueError if a tensor is not what the model takes, or if not all that this worker needs would
    come."""
    number, which = invitation.workers[rank]
    inbox, meeting = invitation.inboxes[which], invitation.meeting
    for tensor in inbox.tensors:
        if held.wants(tensor.name) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{tensor.name} is to come as {tensor.dtype}{list(tensor.shape)}, the model takes {held.wants(tensor.name)}"
            )
    if missing := held.wanted - {tensor.name for tensor in inbox.tensors}:
        raise ValueError(f"{len(missing)} tensors are not to come, the first is {min(missing)}")
    mine = {tensor.name: held.span(tensor.name, tensor.shape) for tensor in inbox.tensors}
    keys = keys_in(Path(os.environ[KEY_FILE]).parent, 0, "weights")
    own_host = os.environ.get("VLLM_HOST_IP") or meeting.host
    group = gloo_group.join(meeting.host, meeting.port, keys, number, meeting.world, own_host, meeting.seconds)
    return InboxReader(post_of(group, number, meeting), inbox, mine, invitation.keep)
