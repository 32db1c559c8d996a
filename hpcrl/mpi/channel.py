"""Messages between the launchers of a run's hosts, over MPI.

Invariants: nothing is pickled (see messages.py); nothing blocks: sends complete in the background, and who does not
take what is sent to it, or is silent for DEAD seconds, counts as gone.
"""

from __future__ import annotations

import time
from typing import Any, Generic, TypeVar

from hpcrl.errors import PeerError
from hpcrl.mpi.channel import Beat, FromHost, FromLauncher, Message, check_size, pack, unpack

TAG = 7
#: seconds between signs of life, and without one until a host counts as gone
BEAT = 2.0
DEAD = 20.0

M = TypeVar("M")


class Channel(Generic[M]):
    """One process's end: `send` to ranks, `receive` what has come, `silent` tells who has not been heard.

    Rank 0 is the launcher and receives what hosts say, the others what the launcher says.
    """

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.world = mpi.COMM_WORLD.Dup()
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        self.heard = dict.fromkeys(range(self.size), time.monotonic())
        self.spoke = 0.0
        self._understood: Any = FromLauncher if self.rank else FromHost
        self._pending: list[tuple[Any, bytes]] = []

    def send(self, to: int, message: Message) -> None:
        """Begin to send a message; it is lost if the receiver is gone.  HpcrlError if it is too large."""
        data = pack(message)
        if to not in self.silent():
            self._pending.append((self.world.Isend([data, self.mpi.BYTE], dest=to, tag=TAG), data))
        self._flush()

    def _flush(self) -> bool:
        """Whether everything that was sent has been taken."""
        self._pending = [(request, kept) for request, kept in self._pending if not request.Test()]
        return not self._pending

    def close(self, seconds: float) -> bool:
        """Take what is still under way, so that MPI can end: some implementations wait for ever for a message nobody
        received.  Collective; False if the others do not come to it within `seconds`, or say what nobody
        understands."""
        deadline, barrier = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            try:
                self.receive()
            except PeerError:
                return False
            if self._flush() and barrier is None:
                barrier = self.world.Ibarrier()
            if barrier is not None and barrier.Test():
                return True
            time.sleep(0.005)
        return False

    def receive(self) -> list[tuple[int, M]]:
        """(rank, message) of everything that has come since the last call.

        PeerError names a rank that sends what is no message, or one that is too large; what came before it is lost.
        """
        found: list[tuple[int, M]] = []
        status = self.mpi.Status()
        while self.world.Iprobe(source=self.mpi.ANY_SOURCE, tag=TAG, status=status):
            size = status.Get_count(self.mpi.BYTE)
            source = status.Get_source()
            check_size(size, source)
            buffer = bytearray(size)
            self.world.Recv([buffer, self.mpi.BYTE], source=source, tag=TAG)
            self.heard[source] = time.monotonic()
            found.append((source, unpack(buffer, self._understood, source)))
        return found

    def beat(self, to: list[int]) -> None:
        """A sign of life, when it is time for one."""
        if time.monotonic() - self.spoke > BEAT:
            self.spoke = time.monotonic()
            for rank in to:
                self.send(rank, Beat())

    def silent(self) -> list[int]:
        """The ranks that have not been heard for DEAD seconds; whoever calls this must also receive."""
        now = time.monotonic()
        return [rank for rank, at in self.heard.items() if rank != self.rank and now - at > DEAD]

    def gather(self, message: Message) -> list[Any]:
        """Every rank's message, all of one kind, in rank order; collective.  PeerError, on every rank, names one that
        sends something else."""
        data = pack(message)
        sizes = bytearray(8 * self.size)
        self.world.Allgather([len(data).to_bytes(8, "little"), self.mpi.BYTE], [sizes, self.mpi.BYTE])
        counts = [int.from_bytes(sizes[8 * i : 8 * i + 8], "little") for i in range(self.size)]
        for rank, count in enumerate(counts):
            check_size(count, rank)
        starts = [sum(counts[:i]) for i in range(self.size)]
        whole = bytearray(sum(counts))
        self.world.Allgatherv([data, self.mpi.BYTE], [whole, counts, starts, self.mpi.BYTE])
        self.heard = dict.fromkeys(range(self.size), time.monotonic())
        parts = zip(starts, counts, strict=True)
        return [unpack(whole[start : start + size], type(message), rank) for rank, (start, size) in enumerate(parts)]
