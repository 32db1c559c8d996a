"""What two ranks send each other to prove that both hold the key of the run.

Each rank makes a fresh nonce for every group, which its peers learn with its address.  Over the pair itself goes an
HMAC-SHA256 (RFC 2104) over who sends, who receives, where both listen in this group, and the two nonces.

Invariants: pure; an answer is right for one pair, one direction and one group: not reflected, not for another group or
rank, and not a second time; comparison takes the same time wherever the first difference lies.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

NONCE = 16  #: bytes
ANSWER = 32  #: bytes
_PURPOSE = b"hpcrl gloo pair 1"


class Place(NamedTuple):
    """One end of a pair.

    Attributes:
        rank: within the group.
        address: as gloo has published it: the port differs in every group.
        nonce: of this rank, for this group.
    """

    rank: int
    address: bytes
    nonce: bytes


def pair_key(secret: str | bytes) -> bytes:
    """The key of pairs, from a secret that all members have and that has another purpose of its own."""
    data = secret.encode() if isinstance(secret, str) else secret
    return hmac.new(data, b"key: " + _PURPOSE, hashlib.sha256).digest()


def new_nonce() -> bytes:
    """Never used before."""
    return secrets.token_bytes(NONCE)


def answer(key: bytes, sender: Place, receiver: Place) -> bytes:
    """What `sender` proves itself to `receiver` with."""
    ends = (part for place in (sender, receiver) for part in (str(place.rank).encode(), place.address, place.nonce))
    text = b"".join(len(part).to_bytes(4, "big") + part for part in (_PURPOSE, *ends))
    return hmac.digest(key, text, hashlib.sha256)


def is_right(given: bytes, key: bytes, me: Place, peer: Place) -> bool:
    """Whether `given`, which came from `peer`'s end, proves that the process there holds the key."""
    return hmac.compare_digest(given, answer(key, peer, me))
