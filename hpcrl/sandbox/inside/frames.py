"""Messages between a box and its user, over a stream: a JSON object and bytes, each of a bounded length.

Invariant: what a peer sends costs at most the bounds here before it is refused, and is data alone.
"""

from __future__ import annotations

import json
import struct
from typing import Any

TRANSFER = 64 << 20  #: bytes of one message's second part
_TEXT = 4 << 20  #: bytes of its JSON
_LENGTHS = struct.Struct(">II")

Message = tuple[dict[str, Any], bytes]


def pack(head: dict[str, Any], body: bytes = b"") -> bytes:
    """One message.

    Raises:
        ValueError: if a part is larger than the other side takes.
    """
    text = json.dumps(head).encode()
    _check(len(text), len(body))
    return _LENGTHS.pack(len(text), len(body)) + text + body


def _check(text: int, body: int) -> None:
    if text > _TEXT or body > TRANSFER:
        raise ValueError(f"a message of {text:,} and {body:,} bytes; at most {_TEXT:,} and {TRANSFER:,}")


class IncomingMessages:
    """Puts together what arrives in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now.

        Raises:
            ValueError: if what arrives is not of `pack`; the stream is of no use then.
        """
        self._data += data
        found = []
        while len(self._data) >= _LENGTHS.size:
            text, body = _LENGTHS.unpack_from(self._data)
            _check(text, body)
            start = _LENGTHS.size
            end = start + text + body
            if len(self._data) < end:
                break
            try:
                head = json.loads(bytes(self._data[start : start + text]))
            except RecursionError as error:
                raise ValueError("a message is nested too deep") from error
            if not isinstance(head, dict):
                raise ValueError("a message is no JSON object")
            found.append((head, bytes(self._data[start + text : end])))
            del self._data[:end]
        return found
