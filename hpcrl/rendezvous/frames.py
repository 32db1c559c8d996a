"""What a store's clients and its server say to one another.

    client -> server   Ask       one frame
    server -> client   Answer    one frame

Invariants: plain data alone, decoded into these types; bytes that are none raise msgspec's errors and nothing else.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Verb = Literal["set", "get", "wait", "check", "add", "append", "swap", "delete", "count"]
#: bytes that a server takes as one frame: what one member tells of itself, for a world of any size
MAX_ASK = 8 * 2**20


class Ask(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A wish.  number: of this connection's wishes, which its answer bears; keys, values: of a `set` as many of each.

    add: amount is added to the decimal number under keys[0].  swap: values are (expected, desired).  get and wait are
    answered when all keys are there.
    """

    number: int
    verb: Verb
    keys: list[str] = []
    values: list[bytes] = []
    amount: int = 0


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """values: of the keys, in order (get, swap); amount: the sum (add), how many keys (count), 0 or 1 (check,
    delete)."""

    number: int
    values: list[bytes] = []
    amount: int = 0


to_ask = msgspec.msgpack.Decoder(Ask)
to_answer = msgspec.msgpack.Decoder(Answer)
to_bytes = msgspec.msgpack.Encoder().encode
