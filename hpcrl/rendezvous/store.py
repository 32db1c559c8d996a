"""A store of torch.distributed whose server knows its members by their keys.

    store = KeyedStore(host, port, keys, timeout)
    torch.distributed.init_process_group("gloo", store=store, rank=..., world_size=...)

torch's own TCPStore takes keys and values from any process that finds its port, and where the members of a group find
one another, an address planted there is as good as the right one.  Invariants: what this store returns was put there by
a member of the run; every call ends within the store's timeout, or as soon as `check` says that there is nothing left
to wait for.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import zmq
from torch.distributed import DistStoreError, Store

from hpcrl.peer_proof.proof import pair_key
from hpcrl.queue import auth
from hpcrl.queue.frames import LIMIT, cut, joined
from hpcrl.queue.sockets import HEARTBEAT, HEARTBEAT_TIMEOUT, endpoint
from hpcrl.rendezvous.table import MAX_ASK, StoreReply, StoreRequest, Verb, to_answer, to_bytes
from hpcrl.toolbox.deadline import Deadline
from hpcrl.toolbox.retry import Pauses
from hpcrl.toolbox.signs import LastSign

LOOK = 2.0  #: seconds between two calls of `check` while an answer is awaited
KNOCK = 1.0  #: seconds that a look at the server's port may take
KNOCKS = Pauses(2 * LOOK, 3600.0)  #: between two of these


def nothing() -> None:
    """Know of nothing that would end a wait early."""


class KeyedStore(Store):
    """A member's view.

    The caller that hands it to torch keeps it too, for as long as torch uses it: torch keeps the part of it alone that
    is torch's.

    Attributes:
        check: called every `look` seconds of a wait, may raise. Threads share it, each with a connection of its own.

    Raises:
        DistStoreError: if the server does not answer, or a key does not appear, in time.
    """

    def __init__(
        self,
        host: str,
        port: int,
        keys: auth.ClientKeys,
        timeout: timedelta,
        check: Callable[[], None] = nothing,
        look: float = LOOK,
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self.host = host
        self.port = port
        self._keys = keys
        self._check = check
        self._look = max(look, LOOK)
        self._mine = threading.local()
        self._pid = os.getpid()

    @property
    def pair_key(self) -> bytes:
        """What members prove the connections between them with: who may ask the store may be one of them."""
        return pair_key(self._keys.secret)

    # ---- what torch calls

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], [_data(value)])

    def get(self, key: str) -> bytes:
        return self._ask("get", [key]).values[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._ask("get", list(keys)).values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask("set", list(keys), [_data(value) for value in values])

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], amount=amount).amount

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", [key], [_data(value)])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask("swap", [key], [_data(expected), _data(desired)]).values[0]

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)).amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys), seconds=(timeout or self.timeout).total_seconds())

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]).amount)

    def num_keys(self) -> int:
        return self._ask("count").amount

    def has_extended_api(self) -> bool:
        return True

    # torch asks for these under the names that they have in C++
    deleteKey = delete_key
    getNumKeys = num_keys
    hasExtendedApi = has_extended_api

    def clone(self) -> KeyedStore:
        return self  # threads have their own connections anyway

    # ---- how

    def _ask(
        self,
        verb: Verb,
        keys: list[str] | None = None,
        values: list[bytes] | None = None,
        amount: int = 0,
        seconds: float = 0,
    ) -> StoreReply:
        """Ask, and wait for the answer."""
        seconds = seconds or self.timeout.total_seconds()
        connection = self._connection()
        self._mine.number = number = self._mine.number + 1
        end = Deadline(seconds)
        knock, looked = Deadline(0.0), LastSign(ago=self._look)
        pauses = iter(KNOCKS)
        asked = to_bytes(StoreRequest(number, verb, keys or [], values or [], amount))
        if len(asked) > MAX_ASK:
            raise DistStoreError(f"{verb} {(keys or [''])[0]}: {len(asked)} bytes, a store takes {MAX_ASK} at once")
        connection.send_multipart(cut(asked))
        while True:
            left = end.left
            if connection.poll(max(0, int(1000 * min(left, LOOK)))):
                answer = to_answer.decode(joined(connection.recv_multipart(), sys.maxsize))
                if answer.number == number:  # else to a question that was given up
                    return answer
            elif left <= 0:
                what = ", ".join((keys or [])[:3])
                raise DistStoreError(
                    f"the store at {self.host}:{self.port} did not answer {verb} {what} within {seconds:.0f} s"
                )
            else:
                if looked.due(self._look):
                    self._check()
                if knock.over:
                    knock = Deadline(next(pauses))
                    self._knock(verb)

    def _knock(self, verb: Verb) -> None:
        """Raise DistStoreError if there is no listener at the server's port any more: it ended, and no answer will ever
        come.

        ZeroMQ alone would connect again and again, and torchrun on all hosts but the server's wait for minutes as they
        end.
        """
        try:
            socket.create_connection((self.host, self.port), timeout=KNOCK).close()
        except ConnectionRefusedError:
            raise DistStoreError(f"the store at {self.host}:{self.port} ended before it answered {verb}") from None
        except OSError:
            pass  # a network that fails for a while is waited for

    def _connection(self) -> zmq.Socket:
        """This thread's own; a forked process has new ones.

        All are in the process's one context: that of a store would end with it, and where the store is part of a cycle
        of garbage wait without end for connections that are collected after it.
        """
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._mine = threading.local()
        found = getattr(self._mine, "socket", None)
        if found is None:
            found = zmq.Context.instance().socket(zmq.DEALER)
            auth.lock_client(found, self._keys)
            found.maxmsgsize = LIMIT
            found.ipv6 = True
            found.linger = 1_000
            found.heartbeat_ivl = HEARTBEAT
            found.heartbeat_timeout = HEARTBEAT_TIMEOUT
            found.connect(endpoint(self.host, self.port))
            self._mine.socket = found
            self._mine.number = 0
        return found


def _data(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
