"""What the launcher (MPI rank 0) and the ranks of the hosts say to each other.

    launcher -> host   Beat, Look, Begin, Files, Quit
    host -> launcher   Beat, Sees, Files, Ended, Bye
    all to all, once   Joined

Invariants: every message is one typed msgspec Struct with a tag, in one buffer of at most MAX_MESSAGE bytes; bytes that
are none raise PeerError, which names the rank that sent them, and nothing else.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from hpcrl.errors import HpcrlError, PeerError
from hpcrl.launch.probe import Report

MAX_MESSAGE = 64 * 2**20  #: bytes
MEND = "use one version of hpcrl on all hosts"

Count = Annotated[int, msgspec.Meta(ge=0)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """Base of all messages."""


class Joined(_Message, tag="joined"):
    """What a rank finds where it runs; gpus: of its host."""

    report: Report
    gpus: Count


class Beat(_Message, tag="beat"):
    """A sign of life."""


class Look(_Message, tag="look"):
    """Is there a file of this absolute path, where you are?"""

    path: str


class Sees(_Message, tag="sees"):
    """The answer to Look."""

    found: bool


class Begin(_Message, tag="begin"):
    """Start your host's part of an attempt.  files: what it needs where it does not see the run directory; see
    Files."""

    root: str
    attempt: Count
    files: dict[str, bytes]


class Files(_Message, tag="files"):
    """Small files that have appeared in the run directory: path in it -> contents."""

    files: dict[str, bytes]


class Ended(_Message, tag="ended"):
    """The sender's part of an attempt has ended with this exit status, negative for a signal."""

    root: str
    attempt: Count
    status: int


class Quit(_Message, tag="quit"):
    """The run is over: say Bye and end with this exit status."""

    status: int


class Bye(_Message, tag="bye"):
    """The sender does nothing more."""


FromLauncher = Beat | Look | Begin | Files | Quit
FromHost = Beat | Sees | Files | Ended | Bye
Message = Joined | FromLauncher | FromHost

_encode = msgspec.msgpack.Encoder().encode


def pack(message: Message) -> bytes:
    """One message as one buffer.  HpcrlError if it is larger than MAX_MESSAGE."""
    data = _encode(message)
    if len(data) > MAX_MESSAGE:
        kind = type(message).__name__
        raise HpcrlError(f"a message ({kind}) of {len(data)} bytes cannot be sent over MPI: {MAX_MESSAGE} are allowed")
    return data


def unpack(data: bytes | bytearray, kinds: Any, rank: int) -> Any:
    """The message in `data`, which must be one of `kinds` (a Struct, or a union).  PeerError names the rank that sent
    it."""
    try:
        return msgspec.msgpack.decode(data, type=kinds)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PeerError(f"MPI rank {rank} sent what is no message to this rank: {error}", MEND) from error


def check_size(size: int, rank: int) -> None:
    """PeerError if a message of so many bytes has come, before it is taken."""
    if size > MAX_MESSAGE:
        raise PeerError(f"MPI rank {rank} sends a message of {size} bytes, {MAX_MESSAGE} are allowed", MEND)
