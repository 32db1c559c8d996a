"""Messages between the launcher (MPI rank 0) and the ranks of the hosts, and the channel that carries them.

    launcher -> host   Beat, FindPath, StartProgram, Quit
    host -> launcher   Beat, PathFound, ProgramEnded, Bye
    all to all, once   RankJoined

Invariants: nothing is pickled: every message is one typed msgspec Struct with a tag, in one buffer of at most
MAX_MESSAGE bytes, and bytes that are not one raise PeerError, which names the rank that sent them.  Nothing blocks:
sends complete in the background; a rank that is silent for DEAD seconds counts as gone.
"""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from hpcrl.errors import PeerError
from hpcrl.launch.probe import HostReport
from hpcrl.utils.waiting import Deadline, LastSign

MAX_MESSAGE = 2**20  #: bytes
MEND = "use one version of hpcrl on all hosts"
TAG = 7
#: seconds between signs of life, and without one until a host counts as gone
BEAT = 2.0
DEAD = 20.0

Count = Annotated[int, msgspec.Meta(ge=0)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """Base of all messages."""


class RankJoined(_Message, tag="joined"):
    """What a rank finds where it runs.

    Attributes:
        gpus: of its host.
    """

    report: HostReport
    gpus: Count


class Beat(_Message, tag="beat"):
    """A sign of life."""


class FindPath(_Message, tag="find path"):
    """Is there a file of this absolute path on your host?"""

    path: str


class PathFound(_Message, tag="path found"):
    """The answer to FindPath."""

    path: str
    found: bool


class StartProgram(_Message, tag="start"):
    """Start a module of hpcrl's as a process; what you started before ends first.

    Attributes:
        number: of this order, for `ProgramEnded`.
        words: the module and its arguments.
        log: where its output goes, "" for nowhere.
    """

    number: Count
    words: tuple[str, ...]
    log: str


class ProgramEnded(_Message, tag="ended"):
    """The program of that order has ended with this exit status, negative for a signal."""

    number: Count
    status: int


class Quit(_Message, tag="quit"):
    """The run is over: say Bye and end with this exit status."""

    status: int


class Bye(_Message, tag="bye"):
    """The sender does nothing more."""


FromLauncher = Beat | FindPath | StartProgram | Quit
FromHost = Beat | PathFound | ProgramEnded | Bye
Message = RankJoined | FromLauncher | FromHost

pack = msgspec.msgpack.Encoder().encode


def unpack(data: bytes | bytearray, kinds: Any, rank: int) -> Any:
    """The message in `data`, which must be one of `kinds` (a Struct, or a union).

    Raises:
        PeerError: names the rank that sent it.
    """
    try:
        return msgspec.msgpack.decode(data, type=kinds)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PeerError(f"MPI rank {rank} sent no valid message for this rank: {error}", MEND) from error


def check_size(size: int, rank: int) -> None:
    """Raise PeerError if a message of so many bytes has come, before it is taken."""
    if size > MAX_MESSAGE:
        raise PeerError(f"MPI rank {rank} sends a message of {size} bytes, {MAX_MESSAGE} are allowed", MEND)


M = TypeVar("M")


class Channel(Generic[M]):
    """One process's end: `send` to ranks, `receive` what has come, `silent` tells who has not been heard.

    Rank 0 is the launcher and receives what hosts say, the others what the launcher says.
    """

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.world = mpi.COMM_WORLD.Dup()
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        self.heard = {rank: LastSign() for rank in range(self.size)}
        self.spoke = LastSign(ago=math.inf)
        self._understood: Any = FromLauncher if self.rank else FromHost
        self._pending: list[tuple[Any, bytes]] = []

    def send(self, to: int, message: Message) -> None:
        """Begin to send a message; it is lost if the receiver is gone."""
        data = pack(message)
        if to not in self.silent():
            self._pending.append((self.world.Isend([data, self.mpi.BYTE], dest=to, tag=TAG), data))
        self._flush()

    def _flush(self) -> bool:
        """Whether everything that was sent has been taken."""
        self._pending = [(request, kept) for request, kept in self._pending if not request.Test()]
        return not self._pending

    def close(self, seconds: float) -> bool:
        """Take what is still under way, so that MPI can end: some implementations wait for ever for a message that
        was not received.  Collective; False if the others do not come to it within `seconds`, or say what no one
        understands."""
        deadline, barrier = Deadline(seconds), None
        while not deadline.over:
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

        Raises:
            PeerError: names a rank that sends what is not a message, or one that is too large; what came before it is
                lost.
        """
        found: list[tuple[int, M]] = []
        status = self.mpi.Status()
        while self.world.Iprobe(source=self.mpi.ANY_SOURCE, tag=TAG, status=status):
            size = status.Get_count(self.mpi.BYTE)
            source = status.Get_source()
            check_size(size, source)
            buffer = bytearray(size)
            self.world.Recv([buffer, self.mpi.BYTE], source=source, tag=TAG)
            self.heard[source].heard()
            found.append((source, unpack(buffer, self._understood, source)))
        return found

    def beat(self, to: list[int]) -> None:
        """A sign of life, when it is time for one."""
        if self.spoke.due(BEAT):
            for rank in to:
                self.send(rank, Beat())

    def silent(self) -> list[int]:
        """The ranks that have not been heard for DEAD seconds; the caller must also receive."""
        return [rank for rank, sign in self.heard.items() if rank != self.rank and sign.silence > DEAD]

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
        self.heard = {rank: LastSign() for rank in range(self.size)}
        parts = zip(starts, counts, strict=True)
        return [unpack(whole[start : start + size], type(message), rank) for rank, (start, size) in enumerate(parts)]
