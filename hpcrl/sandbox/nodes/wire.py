"""What a client and a node with sandboxes say to each other: a kind, the number of a box, and bytes.

    client -> node    OPEN     image and limits, as MessagePack: a box is wanted
                      PREPARE  the same and a count: so many are to be made ahead
                      DATA     bytes for the box
                      TAKEN    how many of the other side's bytes were taken
                      END      the box is not wanted any more
    node -> client    READY    there it is (or they are); whether it is layered
                      DATA, TAKEN
                      GONE     there is no such box (any more): what kind of error that is, and why

Numbers are the client's.  Bytes are those of a stream (`hpcrl.sandbox.frames`), cut where it suits the connection.

Invariant: of each stream at most WINDOW bytes are under way, a message counting as LEAST at least, so that neither side
holds more of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from hpcrl.transport.frames import cut, joined

OPEN, PREPARE, DATA, TAKEN, END, READY, GONE = b"O", b"P", b"D", b"T", b"E", b"R", b"G"
WINDOW = 4 << 20  #: bytes of a stream that were sent and not taken yet
LEAST = 4 << 10  #: bytes that a message costs of the window, however short it is
ACK = 64 << 10  #: bytes that were taken, after which that is said
CHUNK = 256 << 10  #: bytes of one message
MOST = CHUNK + (64 << 10)  #: bytes of a message that a reader takes
KINDS = ("data", "error", "full", "lost", "unconfined", "usage")  #: of errors; full: another node may have room


class BoxRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box that is wanted.

    Attributes:
        limits: the fields of a `BoxLimits`.
        count: how many are to be made ahead.
    """

    image: str
    limits: dict[str, Any]
    count: int = 0


class BoxEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why there is no box.

    Attributes:
        kind: one of KINDS.
    """

    kind: str
    text: str = ""
    hint: str = ""


class BoxMessage(NamedTuple):
    """One message."""

    kind: bytes
    number: int
    body: bytes = b""


def frames_of(message: BoxMessage) -> list[bytes]:
    """A message as frames, each small enough for a server to which anybody may connect."""
    return [message.kind + message.number.to_bytes(8, "big"), *cut(message.body)]


def message_of(frames: Sequence[Any]) -> BoxMessage:
    """The message that came in these frames.

    Raises:
        ValueError: if they are none.
    """
    if len(frames) < 2 or len(frames[0]) != 9:
        raise ValueError("not a message about a sandbox")
    head = bytes(frames[0])
    return BoxMessage(head[:1], int.from_bytes(head[1:], "big"), bytes(joined(frames[1:], MOST)))


def chunks(data: bytes) -> Iterator[bytes]:
    """A stream's bytes in pieces of a message each."""
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def cost(data: bytes) -> int:
    """What a message with these bytes takes of the window."""
    return max(len(data), LEAST)


class TakenBytes:
    """What was taken of the other side's stream, and is not yet said."""

    def __init__(self) -> None:
        self._owed = 0

    def due(self, data: bytes) -> bytes:
        """The body of a TAKEN, now that these were taken too; b"" while there is too little to say."""
        self._owed += cost(data)
        if self._owed < ACK:
            return b""
        said, self._owed = self._owed, 0
        return said.to_bytes(4, "big")


class SendWindow:
    """How much of a stream may still be sent."""

    def __init__(self) -> None:
        self._left = WINDOW
        self._room = asyncio.Event()
        self._room.set()

    async def take(self, data: bytes) -> None:
        """Wait until a message with these bytes may be sent; it is under way then."""
        count = cost(data)
        while self._left < count:
            self._room.clear()
            await self._room.wait()
        self._left -= count

    def taken(self, count: int) -> None:
        """The other side has taken so many."""
        self._left += count
        self._room.set()
