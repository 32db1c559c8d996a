"""What the two sides of the queue say to each other, and how a share is cut into parts of bounded size; what a share
holds is decoded by `share_format.py`.

    client -> server   Hello, Fetch, Ack, Call, Ping                       one frame each, or several (frames.py)
    server -> client   Welcome, WhoAreYou, Reply, Failed, Pong             one frame each, or Long and then its pieces
                       SharePart                                           one frame, then its pieces

Invariants: every message is one typed msgspec Struct with a tag; bytes that are none raise WireError and nothing else;
no message is larger than MAX_FRAME, no frame of a client larger than `frames.LIMIT`, none of the server than MAX_PIECE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from hpcrl import errors
from hpcrl.errors import HpcrlError, PeerError
from hpcrl.transport.frames import cut, joined
from hpcrl.transport.share_format import Buffer, Count, WireError

#: number of this protocol; both sides must speak the same
PROTOCOL = 2
#: bytes of one part of a share, and so of what one credit allows to be under way
PART_BYTES = 64 * 2**20
#: bytes of one frame of a part: a frame is encrypted, sent and decrypted as a whole, so that smaller ones let these
#: overlap (a quarter faster than whole columns in bench/queue.py; smaller still is slower)
PIECE_BYTES = 2**19
#: bytes of one message (a call with its parameters, a reply)
MAX_FRAME = PART_BYTES + 2**20
#: bytes of one frame that a client takes, with what encryption adds to a piece: a larger message goes as several
MAX_PIECE = 2 * PIECE_BYTES
#: parts that may be under way, sent and not acknowledged, unless the client says otherwise
CREDIT = 4
MAX_CREDIT = 64
#: the only key of a call's answer that is not there yet: the caller is to ask again
UNFINISHED = ""
#: characters of an error that are sent
MAX_TEXT = 10_000


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """Base of all messages."""


Name = Annotated[str, msgspec.Meta(max_length=255)]


class Hello(_Message, tag="hello"):
    """Who the client is; `client` is a name that it made up for its lifetime."""

    protocol: int
    run_id: Name
    attempt: int
    dp_rank: int
    dp_size: int
    client: Name
    host: Name
    pid: int


class Welcome(_Message, tag="welcome"):
    """The server's answer to a Hello that fits: who the server is."""

    protocol: int
    run_id: str
    attempt: int
    host: str


class WhoAreYou(_Message, tag="who-are-you"):
    """The server does not know this connection: say Hello, then repeat what is still unanswered."""


class Fetch(_Message, tag="fetch"):
    """Send the share of this rollout; also acknowledges `have`, and every share of earlier rollouts.

    Attributes:
        credit: parts that may be sent and not acknowledged at any time.
        have: parts of this rollout that have arrived.
    """

    rollout_id: Count
    credit: Annotated[int, msgspec.Meta(ge=1, le=MAX_CREDIT)] = CREDIT
    have: list[Count] = []


class SharePart(_Message, tag="part"):
    """One part of a share; its pieces follow as frames.

    Attributes:
        parts: number of parts.
        sizes: bytes of each frame of the whole share (`share_format.encode`), whose concatenation the pieces of all
            parts, in order, make up.
    """

    rollout_id: Count
    part: Count
    parts: Count
    sizes: list[Count]


class Long(_Message, tag="long"):
    """A message that is larger than PIECE_BYTES follows, cut into frames."""


class Ack(_Message, tag="ack"):
    """The part has arrived and need not be sent again."""

    rollout_id: Count
    part: Count


class Call(_Message, tag="call"):
    """Run a handler, once however often this arrives."""

    call_id: Count
    method: str
    params: dict[str, Any]


class Reply(_Message, tag="reply"):
    """What the handler returned."""

    call_id: Count
    result: dict[str, Any]


class Failed(_Message, tag="error"):
    """A call or a fetch, or with neither named whatever the client waits for, has failed.

    Attributes:
        kind: see `error_of`.
    """

    what: str
    hint: str = ""
    kind: str = ""
    call_id: Count | None = None
    rollout_id: Count | None = None


class Ping(_Message, tag="ping"):
    """Do you still know me?"""


class Pong(_Message, tag="pong"):
    """I do."""


FromClient = Hello | Fetch | Ack | Call | Ping
FromServer = Welcome | WhoAreYou | SharePart | Long | Reply | Failed | Pong

_pack = msgspec.msgpack.Encoder().encode
_from_client = msgspec.msgpack.Decoder(FromClient).decode
_from_server = msgspec.msgpack.Decoder(FromServer).decode


def pack(message: FromClient | FromServer) -> bytes:
    """One message as one frame.

    Raises:
        WireError: if it holds what msgpack cannot carry, or is larger than MAX_FRAME.
    """
    try:
        frame = _pack(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"cannot be sent over the queue: {error}") from error
    if len(frame) > MAX_FRAME:
        raise WireError(f"cannot be sent over the queue: {len(frame)} bytes, {MAX_FRAME} are allowed")
    return frame


def to_client(message: FromServer, share: Sequence[Buffer] = ()) -> list[Buffer]:
    """The frames of a server's message.

    Args:
        share: the pieces of a SharePart.
    """
    frame = pack(message)
    return [frame, *share] if len(frame) <= PIECE_BYTES else [pack(Long()), *cut(frame, PIECE_BYTES)]


def whole(frames: Sequence[Buffer]) -> Buffer:
    """The message that came in these frames.

    Raises:
        WireError: if it is larger than MAX_FRAME.
    """
    try:
        return joined(frames, MAX_FRAME)
    except ValueError as error:
        raise WireError(f"not a message of the queue: {error}") from error


def read_from_client(frame: Buffer) -> FromClient:
    """Raise WireError unless `frame` is exactly one message of a client."""
    return _read(_from_client, frame)


def read_from_server(frame: Buffer) -> FromServer:
    """Raise WireError unless `frame` is exactly one message of the server."""
    return _read(_from_server, frame)


def _read(decode: Any, frame: Buffer) -> Any:
    try:
        return decode(frame)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(f"not a message of the queue: {error}") from error


# ---- errors

#: what is of none of these kinds came from a peer, and nothing more is known of it
_KINDS = {name: kind for name, kind in errors.KINDS.items() if kind is not HpcrlError} | {WireError.__name__: WireError}


def failed(error: HpcrlError, call_id: int | None = None, rollout_id: int | None = None) -> Failed:
    """The message that carries `error` to the client."""
    what, hint = (text[:MAX_TEXT].encode(errors="replace").decode() for text in (error.what, error.hint))
    return Failed(what, hint, type(error).__name__, call_id, rollout_id)


def error_of(message: Failed) -> HpcrlError:
    """The exception that `message` stands for: of the same class if that is one of hpcrl's, else PeerError."""
    return _KINDS.get(message.kind, PeerError)(message.what, message.hint)


# ---- parts


def split(frames: Sequence[Buffer], limit: int = PART_BYTES, piece: int = PIECE_BYTES) -> list[list[memoryview]]:
    """The frames cut into parts of at most `limit` bytes, each a list of pieces of at most `piece` bytes: views, in
    order."""
    parts: list[list[memoryview]] = [[]]
    room = limit
    for frame in frames:
        rest = _view(frame)
        while True:
            if room == 0 and len(rest):
                parts.append([])
                room = limit
            taken = rest[: min(room, piece)]
            parts[-1].append(taken)
            room, rest = room - len(taken), rest[len(taken) :]
            if not len(rest):
                break
    return parts


def _view(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def join(sizes: Sequence[int], pieces: Sequence[Buffer]) -> list[Buffer]:
    """The frames of `sizes` bytes whose concatenation is that of `pieces`; a piece that is a whole frame is not copied.

    Raises:
        WireError: if the pieces are too short or too long.
    """
    views = [_view(piece) for piece in pieces]
    if (found := sum(map(len, views))) != sum(sizes):
        raise WireError(f"the parts of a share hold {found} bytes, {sum(sizes)} were declared")
    frames: list[Buffer] = []
    rest = iter(views)
    piece = memoryview(b"")
    for size in sizes:
        cuts: list[memoryview] = []
        while size or not cuts:
            piece = piece if len(piece) else next(rest, memoryview(b""))
            cuts.append(piece[:size])
            piece = piece[size:]
            size -= len(cuts[-1])
        frames.append(cuts[0] if len(cuts) == 1 else b"".join(cuts))
    return frames
