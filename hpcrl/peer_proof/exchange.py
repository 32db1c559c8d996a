"""The proof of one group's pairs, over these pairs themselves: one small message each way, as numbers.

Invariants: nothing else was sent or received on a pair before; it ends within its own deadline, whatever a peer does; a
peer that has not proved itself is named, and where the kernel knows the user that is there, this one too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import DistBackendError

from hpcrl.errors import DeadlineError, HpcrlError, PeerError
from hpcrl.peer_proof import connections
from hpcrl.peer_proof.addresses import AddressStore, listener_of
from hpcrl.peer_proof.proof import ANSWER, answer, is_right
from hpcrl.toolbox.deadline import Deadline

LIMIT = 60.0  #: seconds, once all ranks are there
PER_SECOND = 100  #: peers that even a slow host connects to: rank 0 of a large group has thousands
LOOK = 5.0  #: seconds between two looks at who is connected
TAG = 0x68706000  #: of the messages; a group with several devices takes the one of its tag's remainder
HINT = (
    "another process came between the ranks: ask for nodes of your own (docs/security.md), and tell the site whom the "
    "message names"
)


class Exchange:
    """The proof of a group: `run` it once.

    Args:
        backend: gloo's part of the group, as torch has it.
        name: of the group, for messages.
    """

    def __init__(self, backend: Any, store: AddressStore, key: bytes, peers: Sequence[int], name: str) -> None:
        self._backend = backend
        self._store = store
        self._key = key
        self._peers = peers
        self._name = name
        self._liars: list[int] = []
        self._error: Exception | None = None
        self._seen: dict[int, int] = {}

    def run(self, limit: float = LIMIT) -> None:
        """Prove this rank to its peers and have them prove themselves.

        gloo connects, and waits for connections, far longer than `limit`: it does so in a thread, which is left behind
        where the proof fails, as the process then ends.

        Raises:
            PeerError: names a peer in whose place there is another process.
            DeadlineError: after `limit` seconds.
            DistBackendError: if a connection ended, which may be but the echo of a rank's own error.
        """
        thread = threading.Thread(target=self._work, name="gloo proof", daemon=True)
        thread.start()
        deadline = Deadline(limit + len(self._peers) / PER_SECOND)
        while not deadline.over:
            thread.join(min(LOOK, deadline.left))
            if not thread.is_alive():
                break
            self._drop_strangers()
        self._judge(thread.is_alive(), limit)

    def _work(self) -> None:
        try:
            for device in sorted(self._store.mine):
                self._prove(device)
        except Exception as error:  # noqa: BLE001  (told by the thread that waits)
            self._error = error

    def _prove(self, device: int) -> None:
        me = self._store.mine[device]
        ends = [self._store.peers[device, peer] for peer in self._peers]
        answers = b"".join(answer(self._key, me, end) for end in ends)
        sent = torch.frombuffer(bytearray(answers), dtype=torch.uint8).view(len(ends), ANSWER)
        come = torch.zeros_like(sent)
        tag = TAG * len(self._store.mine) + device
        works = []
        for number, peer in enumerate(self._peers):
            works.append(self._backend.send([sent[number]], peer, tag))
            works.append(self._backend.recv([come[number]], peer, tag))
        for work in works:
            work.wait()
        given = [row.tobytes() for row in come.numpy()]
        self._liars += [end.rank for one, end in zip(given, ends, strict=True) if not is_right(one, self._key, me, end)]

    def _drop_strangers(self) -> None:
        """End connections of other users to this rank's ports: one in a peer's place ends the wait for that peer."""
        for end in self._store.mine.values():
            port = listener_of(end.address).port
            if found := connections.strangers(port):
                self._seen |= found
                connections.drop(port, found)

    def _judge(self, unfinished: bool, limit: float) -> None:
        if not (unfinished or self._liars or self._error):
            return
        self._drop_strangers()
        whom = ", ".join(self._called(peer) for peer in self._liars) or "a rank"
        users = ", ".join(f"user {uid}" for uid in sorted(set(self._seen.values())))
        if self._liars or users:
            by = f": {users} of this host connected to it" if users else ""
            raise PeerError(f"a process without the run's key answered in place of {whom} of {self._name}{by}", HINT)
        if unfinished:
            raise DeadlineError(
                f"the ranks of {self._name} did not prove within {limit:.0f} s to one another who they are",
                "one of them hangs, or a process that says nothing took its place: see the logs of the others",
            )
        if isinstance(self._error, HpcrlError):
            raise self._error
        raise DistBackendError(
            f"a connection of {self._name} ended before its ranks proved who they are: {self._error}"
        ) from self._error

    def _called(self, peer: int) -> str:
        end = self._store.peers[min(self._store.mine), peer]
        return f"rank {peer} on {listener_of(end.address).host}"
