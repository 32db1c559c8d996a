"""Messages as frames that are small before anybody has proved who it is.

libzmq takes a whole frame into memory, up to a limit of the socket, before the peer that sends it has proved a key, and
the limit cannot be another one afterwards.  So a message to a server to which anybody may connect goes in frames of
PIECE bytes, and the server takes none larger than LIMIT.

Invariant: what is cut here is joined to the same bytes, and nothing is that is larger than the reader's bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: bytes of a message in one frame
PIECE = 2**13
#: bytes of a frame that a server takes: a piece, and what encryption adds to it
LIMIT = PIECE + 2**10


def cut(message: Any, piece: int = PIECE) -> list[Any]:
    """A message as the frames that it is sent in."""
    if len(message) <= piece:
        return [message]
    return [message[at : at + piece] for at in range(0, len(message), piece)]


def joined(frames: Sequence[Any], most: int) -> Any:
    """The message that came in these frames.

    Raises:
        ValueError: if it is larger than `most` bytes.
    """
    if len(frames) == 1:
        return frames[0]
    if (size := sum(map(len, frames))) > most:
        raise ValueError(f"{size} bytes, at most {most} are allowed")
    return b"".join(frames)
