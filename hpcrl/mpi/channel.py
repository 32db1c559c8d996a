"""Messages between the launchers of a run's hosts, over MPI.

Invariants: nothing is pickled: a message is JSON in a byte buffer; nothing blocks: sends complete in the background, and who
does not take what is sent to it, or is silent for DEAD seconds, counts as gone.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

TAG = 7
BEAT, DEAD = 2.0, 20.0  #: seconds between signs of life, and without one until a host counts as gone
MOST = 64 * 1024**2


class Channel:
    """One process's end: `send` to ranks, `receive` what has come, `silent` tells who has not been heard."""

    def __init__(self, mpi: Any) -> None:
        self.mpi, self.world = mpi, mpi.COMM_WORLD.Dup()
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        self.heard = dict.fromkeys(range(self.size), time.monotonic())
        self.spoke = 0.0
        self._pending: list[tuple[Any, bytes]] = []

    def send(self, to: int, **message: Any) -> None:
        """Begin to send a message; it is lost if the receiver is gone."""
        data = msgspec.json.encode(message)
        if to not in self.silent():
            self._pending.append((self.world.Isend([data, self.mpi.BYTE], dest=to, tag=TAG), data))
        self._flush()

    def _flush(self) -> bool:
        """Whether everything that was sent has been taken."""
        self._pending = [(request, kept) for request, kept in self._pending if not request.Test()]
        return not self._pending

    def close(self, seconds: float) -> bool:
        """Take what is still under way, so that MPI can end: some implementations wait for ever for a message nobody
        received.  Collective; False if the others do not come to it within `seconds`."""
        deadline, barrier = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            self.receive()
            if self._flush() and barrier is None:
                barrier = self.world.Ibarrier()
            if barrier is not None and barrier.Test():
                return True
            time.sleep(0.005)
        return False

    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        """(rank, message) of everything that has come since the last call."""
        found, status = [], self.mpi.Status()
        while self.world.Iprobe(source=self.mpi.ANY_SOURCE, tag=TAG, status=status):
            size, source = status.Get_count(self.mpi.BYTE), status.Get_source()
            buffer = bytearray(min(size, MOST))
            self.world.Recv([buffer, self.mpi.BYTE], source=source, tag=TAG)
            self.heard[source] = time.monotonic()
            found.append((source, msgspec.json.decode(buffer, type=dict)))
        return found

    def beat(self, to: list[int]) -> None:
        """A sign of life, when it is time for one."""
        if time.monotonic() - self.spoke > BEAT:
            self.spoke = time.monotonic()
            for rank in to:
                self.send(rank, op="beat")

    def silent(self) -> list[int]:
        """The ranks that have not been heard for DEAD seconds; whoever calls this must also receive."""
        now = time.monotonic()
        return [rank for rank, at in self.heard.items() if rank != self.rank and now - at > DEAD]

    def all(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order; collective."""
        data = msgspec.json.encode(value)
        sizes = bytearray(8 * self.size)
        self.world.Allgather([len(data).to_bytes(8, "little"), self.mpi.BYTE], [sizes, self.mpi.BYTE])
        counts = [int.from_bytes(sizes[8 * i : 8 * i + 8], "little") for i in range(self.size)]
        starts = [sum(counts[:i]) for i in range(self.size)]
        whole = bytearray(sum(counts))
        self.world.Allgatherv([data, self.mpi.BYTE], [whole, counts, starts, self.mpi.BYTE])
        self.heard = dict.fromkeys(range(self.size), time.monotonic())
        return [msgspec.json.decode(bytes(whole[s : s + n])) for s, n in zip(starts, counts, strict=True)]
