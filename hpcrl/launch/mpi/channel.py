"""Messages between the launcher (MPI rank 0) and the ranks of the hosts, and the channel that carries them.

    launcher -> host   Beat, CheckPath, TryBoxes, BeginAttempt, RunFiles, Quit
    host -> launcher   Beat, PathFound, BoxesTried, RunFiles, HostEnded, Bye
    all to all, once   RankJoined

Invariants: nothing is pickled: every message is one typed msgspec Struct with a tag, in one buffer of at most
MAX_MESSAGE bytes, and bytes that are not one raise PeerError, which names the rank that sent them.  Nothing blocks:
sends complete in the background; a rank that does not take what is sent to it, or is silent for DEAD seconds, counts as
gone.
"""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from hpcrl.errors import HpcrlError, PeerError
from hpcrl.launch.probe import HostReport
from hpcrl.sandbox.nodes.trial import BoxTrial
from hpcrl.utils.deadline import Deadline
from hpcrl.utils.liveness import LastSign

MAX_MESSAGE = 64 * 2**20  #: bytes
MEND = "use one version of hpcrl on all hosts"

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


class CheckPath(_Message, tag="look"):
    """Is there a file of this absolute path, where you are?"""

    path: str


class PathFound(_Message, tag="sees"):
    """The answer to Look."""

    found: bool


class TryBoxes(_Message, tag="try boxes"):
    """Can sandboxes of these kinds (`try_kinds`) be made where you are?"""

    kinds: tuple[str, ...]


class BoxesTried(_Message, tag="tried boxes"):
    """The answer to TryBoxes."""

    trial: BoxTrial


class BeginAttempt(_Message, tag="begin"):
    """Start your host's part of an attempt.

    Attributes:
        files: what it needs where it does not see the run directory; see Files.
    """

    root: str
    attempt: Count
    files: dict[str, bytes]


class RunFiles(_Message, tag="files"):
    """Small files that have appeared in the run directory: path in it -> contents."""

    files: dict[str, bytes]


class HostEnded(_Message, tag="ended"):
    """The sender's part of an attempt has ended with this exit status, negative for a signal."""

    root: str
    attempt: Count
    status: int


class Quit(_Message, tag="quit"):
    """The run is over: say Bye and end with this exit status."""

    status: int


class Bye(_Message, tag="bye"):
    """The sender does nothing more."""


FromLauncher = Beat | CheckPath | TryBoxes | BeginAttempt | RunFiles | Quit
FromHost = Beat | PathFound | BoxesTried | RunFiles | HostEnded | Bye
Message = RankJoined | FromLauncher | FromHost

_encode = msgspec.msgpack.Encoder().encode


def pack(message: Message) -> bytes:
    """One message as one buffer.

    Raises:
        HpcrlError: if it is larger than MAX_MESSAGE.
    """
    data = _encode(message)
    if len(data) > MAX_MESSAGE:
        kind = type(message).__name__
        raise HpcrlError(f"a message ({kind}) of {len(data)} bytes cannot be sent over MPI: {MAX_MESSAGE} are allowed")
    return data


def unpack(data: bytes | bytearray, kinds: Any, rank: int) -> Any:
    """The message in `data`, which must be one of `kinds` (a Struct, or a union).

    Raises:
        PeerError: names the rank that sent it.
    """
    try:
        return msgspec.msgpack.decode(data, type=kinds)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise PeerError(f"MPI rank {rank} sent what is not a message to this rank: {error}", MEND) from error


def check_size(size: int, rank: int) -> None:
    """Raise PeerError if a message of so many bytes has come, before it is taken."""
    if size > MAX_MESSAGE:
        raise PeerError(f"MPI rank {rank} sends a message of {size} bytes, {MAX_MESSAGE} are allowed", MEND)


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
        self.heard = {rank: LastSign() for rank in range(self.size)}
        self.spoke = LastSign(ago=math.inf)
        self._understood: Any = FromLauncher if self.rank else FromHost
        self._pending: list[tuple[Any, bytes]] = []

    def send(self, to: int, message: Message) -> None:
        """Begin to send a message; it is lost if the receiver is gone.

        Raises:
            HpcrlError: if it is too large.
        """
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
