"""What a store holds, what its clients and its server say to each other, and who waits for what.

    client -> server   StoreRequest   one frame, or several (queue/frames.py)
    server -> client   StoreReply     the same

`Table` is the rules of torch.distributed's stores as a pure object.

Invariants: plain data alone, decoded into these types; bytes that are none raise msgspec's errors and nothing else.  A
`StoreRequest` gets exactly one `StoreReply`, at once or when the last key that it waits for appears.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

import msgspec

Verb = Literal["set", "get", "wait", "check", "add", "append", "swap", "delete", "count"]
#: bytes of a request that a server takes: what one member tells of itself, for a world of any size
MAX_ASK = 8 * 2**20


class StoreRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request.

    add: amount is added to the decimal number under keys[0]. swap: values are (expected, desired). get and wait are
    answered when all keys are there.

    Attributes:
        number: of this connection's requests, which its answer carries.
        keys, values: of a `set` as many of each.
    """

    number: int
    verb: Verb
    keys: list[str] = []
    values: list[bytes] = []
    amount: int = 0


class StoreReply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The store's answer to one request.

    Attributes:
        values: of the keys, in order (get, swap).
        amount: the sum (add), how many keys (count), 0 or 1 (check, delete).
    """

    number: int
    values: list[bytes] = []
    amount: int = 0


to_ask = msgspec.msgpack.Decoder(StoreRequest)
to_answer = msgspec.msgpack.Decoder(StoreReply)
to_bytes = msgspec.msgpack.Encoder().encode


class Table:
    """Keys and values, and the requests that wait for keys.  Members are named by whatever bytes the caller likes."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[bytes, StoreRequest]]] = defaultdict(list)

    def take(self, member: bytes, ask: StoreRequest) -> list[tuple[bytes, StoreReply]]:
        """Do what `member` asks for; the answers that are due now, to it and to whom its keys were awaited by.

        Raises:
            ValueError: for an Ask that makes no sense.
        """
        if ask.verb in ("get", "wait"):
            return self._later(member, ask)
        if ask.verb == "count":
            return [(member, StoreReply(ask.number, amount=len(self.values)))]
        if ask.verb == "check":
            return [(member, StoreReply(ask.number, amount=int(all(key in self.values for key in ask.keys))))]
        answer = self._change(ask)
        due = [(member, answer)]
        for key in ask.keys:
            if key in self.values:
                for other, waiting in self._waiting.pop(key, []):
                    due += self._later(other, waiting)
        return due

    def _later(self, member: bytes, ask: StoreRequest) -> list[tuple[bytes, StoreReply]]:
        """The answer if all keys are there; else none, and the request waits for the first that is not."""
        for key in ask.keys:
            if key not in self.values:
                self._waiting[key].append((member, ask))
                return []
        return [(member, StoreReply(ask.number, [self.values[key] for key in ask.keys] if ask.verb == "get" else []))]

    def _change(self, ask: StoreRequest) -> StoreReply:
        if ask.verb == "set":
            self.values.update(zip(ask.keys, ask.values, strict=True))
            return StoreReply(ask.number)
        (key,) = ask.keys
        if ask.verb == "delete":
            return StoreReply(ask.number, amount=int(self.values.pop(key, None) is not None))
        if ask.verb == "add":
            total = int(self.values.get(key, b"0")) + ask.amount
            self.values[key] = str(total).encode()
            return StoreReply(ask.number, amount=total)
        if ask.verb == "append":
            (value,) = ask.values
            self.values[key] = self.values.get(key, b"") + value
            return StoreReply(ask.number)
        expected, desired = ask.values  # swap
        if key not in self.values and expected:
            return StoreReply(ask.number, [expected])
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return StoreReply(ask.number, [self.values[key]])
