"""What the two sides of the queue say to each other; what a share holds is decoded by `share_format.py`.

    client -> server   Hello, Fetch, Call            one message in one frame, or in several (`cut`)
    server -> client   Welcome, Pending, Failed      one frame each
                       Answer                        one frame, then the bytes of a share or of a result, in pieces

A client sends a request again until it has the answer, which is the same bytes each time.

Invariants: every message is one typed msgspec Struct with a tag; other bytes raise WireError and nothing else;
no message, and no result of a call, is larger than MAX_MESSAGE, no frame of a client larger than LIMIT, none
of the server than MAX_PIECE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from hpcrl import errors
from hpcrl.errors import HpcrlError, PeerError
from hpcrl.transport.share_format import Buffer, Count, WireError

#: number of this protocol; both sides must speak the same
PROTOCOL = 4
#: bytes of one frame of an answer: a frame is encrypted, sent and decrypted as a whole, so that smaller ones let these
#: overlap (a quarter faster than whole columns in bench/queue.py; smaller still is slower)
PIECE_BYTES = 2**19
#: bytes of one frame that a client takes, with what encryption adds to a piece
MAX_PIECE = 2 * PIECE_BYTES
#: bytes of one message (a call with its parameters), and of the result of a call
MAX_MESSAGE = 2**26
#: the only key of a call's answer that is not there yet: the caller is to ask again
UNFINISHED = ""
#: characters of an error that are sent
MAX_TEXT = 10_000

Name = Annotated[str, msgspec.Meta(max_length=255)]
#: which request an answer is to: the share of a rollout, or a call of this client, and its number
Request = tuple[Literal["hello", "share", "call"], Count]
HELLO: Request = ("hello", 0)


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """Base of all messages."""


class Hello(_Message, tag="hello"):
    """Who the client is."""

    protocol: int
    run_id: Name
    attempt: int
    dp_rank: int
    dp_size: int
    host: Name


class Welcome(_Message, tag="welcome"):
    """The answer to a Hello that fits: who the server is."""

    protocol: int
    run_id: str
    attempt: int


class Fetch(_Message, tag="fetch"):
    """Send the shares of the rollouts from `first` to `last` as soon as they are there; those before have arrived."""

    first: Count
    last: Count


class Call(_Message, tag="call"):
    """Run a handler, once however often this arrives.

    Attributes:
        client: a name that the client made up for its lifetime.
        number: of its calls; they go up.
    """

    client: Name
    number: Count
    method: str
    params: dict[str, Any]


class Answer(_Message, tag="answer"):
    """The answer to a request; its bytes follow.

    Attributes:
        sizes: bytes of each frame of the answer, before these were cut into pieces.
    """

    to: Request
    sizes: list[Count]


class Failed(_Message, tag="error"):
    """A request, or with none named whatever the client waits for, has failed.

    Attributes:
        kind: see `error_of`.
    """

    what: str
    hint: str = ""
    kind: str = ""
    to: Request | None = None


class Pending(_Message, tag="pending"):
    """The answer is not there yet, or on its way over this connection."""


FromClient = Hello | Fetch | Call
FromServer = Welcome | Pending | Answer | Failed

_pack = msgspec.msgpack.Encoder().encode
_from_client = msgspec.msgpack.Decoder(FromClient).decode
_from_server = msgspec.msgpack.Decoder(FromServer).decode
_result = msgspec.msgpack.Decoder(dict[str, Any]).decode


def pack(message: FromClient | FromServer | dict[str, Any]) -> bytes:
    """One message, or the result of a call.

    Raises:
        WireError: if it holds what msgpack cannot carry, or is larger than MAX_MESSAGE.
    """
    try:
        frame = _pack(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"cannot be sent over the queue: {error}") from error
    if len(frame) > MAX_MESSAGE:
        raise WireError(f"cannot be sent over the queue: {len(frame)} bytes, {MAX_MESSAGE} are allowed")
    return frame


def answer(to: Request, frames: Sequence[Buffer]) -> list[Buffer]:
    """The frames of an answer whose bytes are `frames`: an Answer, and views on them."""
    views = [memoryview(frame) for frame in frames]
    head = pack(Answer(to, [len(view) for view in views]))
    return [head, *(piece for view in views for piece in cut(view, PIECE_BYTES))]


def join(sizes: Sequence[int], pieces: Sequence[Buffer]) -> list[Buffer]:
    """The frames of an Answer; one that came in a single piece is not copied.

    Raises:
        WireError: if they are not of these sizes.
    """
    frames: list[Buffer] = []
    at = 0
    for size in sizes:
        end = at + max(1, -(-size // PIECE_BYTES))
        frames.append(pieces[at] if end == at + 1 <= len(pieces) else b"".join(pieces[at:end]))
        at = end
    if at != len(pieces) or [len(frame) for frame in frames] != list(sizes):
        raise WireError(f"an answer has {sum(map(len, pieces))} bytes, {sum(sizes)} were declared")
    return frames


def read_from_client(frames: Sequence[Buffer]) -> FromClient:
    """Raise WireError unless `frames` are exactly one message of a client."""
    return _read(lambda cut: _from_client(joined(cut, MAX_MESSAGE)), frames)


def read_from_server(frame: Buffer) -> FromServer:
    """Raise WireError unless `frame` is exactly one message of the server."""
    return _read(_from_server, frame)


def read_result(frame: Buffer) -> dict[str, Any]:
    """Raise WireError unless `frame` is the result of a call."""
    return _read(_result, frame)


def _read(decode: Any, received: Any) -> Any:
    try:
        return decode(received)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"not a message of the queue: {error}") from error


# ---- errors

#: what is of none of these kinds came from a peer, and nothing more is known of it
_KINDS = {name: kind for name, kind in errors.KINDS.items() if kind is not HpcrlError} | {WireError.__name__: WireError}


def failed(error: HpcrlError, to: Request | None = None) -> list[Buffer]:
    """The frames of the message that carries `error` to the client."""
    what, hint = (text[:MAX_TEXT].encode(errors="replace").decode() for text in (error.what, error.hint))
    return [pack(Failed(what, hint, type(error).__name__, to))]


def error_of(message: Failed) -> HpcrlError:
    """The exception that `message` stands for: of the same class if that is one of hpcrl's, else PeerError."""
    return _KINDS.get(message.kind, PeerError)(message.what, message.hint)


# ---- frames of what anybody may send
# libzmq takes a whole frame into memory, up to a limit of the socket, before the peer that sends it has proved a key,
# and the limit cannot be another one afterwards.  So a message to a server to which anybody may connect goes in frames
# of PIECE bytes, and the server takes none larger than LIMIT.

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
