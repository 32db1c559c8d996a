"""What a landing (a host with workers) is told once of the pieces that every update brings it: plain values, as JSON.

Members of an update have numbers: trainer ranks first, then workers.  A message is what one sender has for one landing
in one round.  It is *near* if it lies in memory of the sender, who is on the same host; otherwise it comes over a
socket to the landing's *porter*, one of its workers, into memory that the others there map.

Invariant: an inbox that was read from the wire is checked in full before a byte is received.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hpcrl.model_files.safetensors_headers import ITEM_BYTES

#: kinds of messages; between two members those of a kind keep their order
READY = 0
DONE = 1
DATA = 2
HALVES = 2  #: rounds that may be under way


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole tensor, of which pieces are sent: name, dtype (torch's name), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pieces of one sender for one landing in one round.

    half, offset: where they begin in the sender's memory if near, otherwise in the porter's; pieces: (tensor, top,
    bottom, left, right, offset in the message).
    """

    sender: int
    near: bool
    half: int
    offset: int
    nbytes: int
    pieces: tuple[tuple[int, int, int, int, int, int], ...]


class Inbox(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that reaches a landing: limit: bytes of a half of a memory; onward: porters that it hands all of it
    to."""

    porter: int
    workers: tuple[int, ...]
    limit: int
    tensors: tuple[Tensor, ...]
    rounds: tuple[tuple[Message, ...], ...]
    onward: tuple[int, ...] = ()

    def messages(self) -> Iterator[Message]:
        """All, in order of rounds."""
        for messages in self.rounds:
            yield from messages


class Meeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the members of an update meet: `world` of them, trainer ranks below `ranks`.

    nccl: the name of a group of NCCL's over which bytes go (base64), or "" if they go as words do; ipc: they lie in
    memory of the ranks' devices, which the workers open.
    """

    host: str
    port: int
    world: int
    ranks: int
    seconds: float
    nccl: str = ""
    ipc: bool = False


class Invitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine's workers are told: the meeting, the inboxes, and for each rank of a worker its (number, inbox).

    keep: what has come is kept, for updates that bring what has changed since.
    """

    meeting: Meeting
    inboxes: tuple[Inbox, ...]
    workers: dict[str, tuple[int, int]]
    keep: bool = False


def read_invitation(text: str) -> Invitation:
    """From JSON.  ValueError says what is wrong with it."""
    try:
        found = msgspec.json.decode(text, type=Invitation)
    except msgspec.MsgspecError as error:
        raise ValueError(f"malformed plan of pieces: {error}") from error
    for inbox in found.inboxes:
        _check(inbox)
    return found


def _check(inbox: Inbox) -> None:
    for tensor in inbox.tensors:
        if tensor.dtype not in ITEM_BYTES or not 1 <= len(tensor.shape) <= 2 or min(tensor.shape) < 0:
            raise ValueError(f"malformed plan of pieces: {tensor.name} is {tensor.dtype}{list(tensor.shape)}")
    for message in inbox.messages():
        if not (
            message.offset >= 0
            and 0 <= message.nbytes <= inbox.limit - message.offset
            and message.half in range(HALVES)
        ):
            raise ValueError(f"malformed plan of pieces: a message of {message.nbytes} bytes at {message.offset}")
        for number, top, bottom, left, right, offset in message.pieces:
            if not 0 <= number < len(inbox.tensors):
                raise ValueError(f"malformed plan of pieces: there is no tensor {number}")
            tensor = inbox.tensors[number]
            rows = tensor.shape[0]
            columns = tensor.shape[1] if len(tensor.shape) > 1 else 1
            size = (bottom - top) * (right - left) * ITEM_BYTES[tensor.dtype]
            if not (
                0 <= top < bottom <= rows and 0 <= left < right <= columns and 0 <= offset <= message.nbytes - size
            ):
                raise ValueError(f"malformed plan of pieces: {tensor.name} has no [{top}:{bottom}, {left}:{right}]")


def whereabouts() -> str:
    """The same text in processes that can open each other's memory: one kernel, one name, one space of process
    numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def known(value: Any) -> str:
    """As JSON text."""
    return msgspec.json.encode(value).decode()
