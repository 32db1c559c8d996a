"""The store through which gloo tells and finds its peers' addresses, under the group's own store.

gloo asks for an address when it connects to that peer, which may be long after the group was made.

Invariants: what gloo publishes and is told of addresses is known here, so that a proof can name both; once `keep` was
called, no other peer's address is given, so that gloo connects to none that has not proved itself.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import Store

from hpcrl.errors import HpcrlError
from hpcrl.peer_proof.pairs import WHOLE
from hpcrl.peer_proof.proof import NONCE, Place, new_nonce

ADDRESS = re.compile(r"(\d+)/(\d+)")  #: gloo's key: DEVICE/RANK
_SIZE = struct.Struct("=Q")
_SOCKET = struct.Struct("!H")


class Listener(NamedTuple):
    """Where a rank's gloo accepts connections: what it published, taken apart."""

    host: str
    port: int


def listener_of(published: bytes) -> Listener:
    """The host name and port in what gloo has published: two byte strings, each after its length, the second of which
    begins with a socket address.

    Raises:
        HpcrlError: if it is anything else.
    """
    try:
        (length,) = _SIZE.unpack_from(published)
        host = published[_SIZE.size : _SIZE.size + length].decode()
        at = _SIZE.size + length + _SIZE.size
        (port,) = _SOCKET.unpack_from(published, at + 2)  # after the address family, in every family
    except (struct.error, ValueError):
        host, port = "", 0
    if not port:
        raise HpcrlError("this version of torch publishes gloo's addresses in another form", "see docs/install.md")
    return Listener(host, port)


class AddressStore(Store):
    """A view of a group's store, for gloo alone.  It must live as long as gloo asks: torch keeps its own part alone.

    Attributes:
        mine: this rank's end for each of gloo's devices.
        peers: those of others, by device and rank.
    """

    def __init__(self, inner: Store, rank: int) -> None:
        super().__init__()
        self.set_timeout(inner.timeout)
        self.inner = inner
        self.rank = rank
        self.mine: dict[int, Place] = {}
        self.peers: dict[tuple[int, int], Place] = {}
        self._proved: frozenset[int] | None = None

    def learn(self, ranks: Iterable[int]) -> None:
        """Ask for the addresses of all these at once; gloo is told them without asking the store again."""
        places = [(device, rank) for rank in ranks for device in self.mine]
        if new := [f"{device}/{rank}" for device, rank in places if (device, rank) not in self.peers]:
            self.multi_get(new)

    def keep(self, ranks: Iterable[int]) -> None:
        """Give no address but those of these ranks from now on."""
        self._proved = frozenset(ranks)

    # ---- what torch calls

    def set(self, key: str, value: str | bytes) -> None:
        if (place := _place(key)) is not None and place[1] == self.rank:
            data = value.encode() if isinstance(value, str) else bytes(value)
            end = self.mine[place[0]] = Place(self.rank, data, new_nonce())
            value = end.nonce + data  # in one value: every request of every rank counts in a large group
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        places = [self._allowed(key) for key in keys]
        new = [key for key, place in zip(keys, places, strict=True) if place is None or place not in self.peers]
        if self.inner.has_extended_api() and len(new) > 1:
            values = dict(zip(new, self.inner.multi_get(new), strict=True))
        else:
            values = {key: self.inner.get(key) for key in new}
        for key, value in values.items():
            if place := _place(key):
                self.peers[place] = Place(place[1], bytes(value[NONCE:]), bytes(value[:NONCE]))
        return [self.peers[place].address if place else values[key] for key, place in zip(keys, places, strict=True)]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        new = [key for key in keys if self._allowed(key) not in self.peers]
        if new:
            self.inner.wait(new, timeout or self.timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self.inner.check(list(keys))

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def append(self, key: str, value: str | bytes) -> None:
        self.inner.append(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return self.inner.delete_key(key)

    def num_keys(self) -> int:
        return self.inner.num_keys()

    def has_extended_api(self) -> bool:
        return self.inner.has_extended_api()

    # torch asks for these under the names that they have in C++
    deleteKey = delete_key
    getNumKeys = num_keys
    hasExtendedApi = has_extended_api

    def _allowed(self, key: str) -> tuple[int, int] | None:
        """Which address this key stands for, if any.

        Raises:
            HpcrlError: if it is that of a rank that has not proved itself.
        """
        place = _place(key)
        if place is not None and self._proved is not None and place[1] not in self._proved:
            raise HpcrlError(
                f"this rank and rank {place[1]} of its gloo group have not proved to each other who they are: in "
                f"groups of more than {WHOLE} ranks only those do that all-reduce, all-gather, broadcast and barrier "
                "use, and rank 0 with every other",
                "exchange over a smaller group, or by way of its rank 0",
            )
        return place


def _place(key: str) -> tuple[int, int] | None:
    found = ADDRESS.fullmatch(key)
    return (int(found[1]), int(found[2])) if found else None
