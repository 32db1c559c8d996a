"""What the launcher (MPI rank 0) and the ranks of the hosts tell each other.

    all to all, once   HostReport   what a rank finds where it runs (probe.py)
    launcher -> host   Order        what the host is to run
    launcher -> host   Quit         the run is over
    host -> launcher   OrderState   how the order goes

An order, or a state, replaces the one before it.  It is sent again every BEAT seconds, as a sign of life.

Invariants: nothing is pickled: every message is one typed msgspec Struct, after `gather` in one buffer of at most
MAX_MESSAGE bytes, and other bytes raise PeerError, which names the rank that sent them.  Nothing blocks but `gather`:
sends complete in the background; a rank that is silent for DEAD seconds counts as gone.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from hpcrl.errors import PeerError
from hpcrl.utils.waiting import Deadline, LastSign

MAX_MESSAGE = 2**20  #: bytes
MEND = "use one version of hpcrl on all hosts"
#: seconds between signs of life, and without one until a host counts as gone
BEAT = 2.0
DEAD = 20.0
PART = 20.0  #: seconds that the ranks may take to part at the end

Count = Annotated[int, msgspec.Meta(ge=0)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is"):
    """Base of all messages."""


class Order(_Message, tag="order"):
    """Run a module of hpcrl's; what the order before it has started ends first.

    Attributes:
        number: 0 for the first order, which starts nothing; one more for each that follows.
        words: the module and its arguments.
        log: where its output goes, "" for nowhere.
    """

    number: Count = 0
    words: tuple[str, ...] = ()
    log: str = ""


class Quit(_Message, tag="quit"):
    """The run is over: end with this exit status."""

    status: int


class OrderState(_Message, tag="state"):
    """How an order goes.

    Attributes:
        number: of the order.
        status: the exit status of its process, negative for a signal; None while it runs.
    """

    number: Count = 0
    status: int | None = None


FromLauncher = Order | Quit
Message = FromLauncher | OrderState

pack = msgspec.json.Encoder().encode


def unpack(data: bytes | bytearray, kinds: Any, rank: int) -> Any:
    """The message in `data`, which must be one of `kinds` (a Struct, or a union).

    Raises:
        PeerError: names the rank that sent it.
    """
    try:
        return msgspec.json.decode(data, type=kinds)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"MPI rank {rank} sent no valid message for this rank: {error}", MEND) from error


M = TypeVar("M")


class Channel(Generic[M]):
    """One process's end of the messages.

    Attributes:
        peers: the ranks to which this rank talks: those of all hosts for the launcher, the launcher for a host.
    """

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.world = mpi.COMM_WORLD.Dup()
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        self.peers = [0] if self.rank else list(range(1, self.size))
        self._understood: Any = FromLauncher if self.rank else OrderState
        self._heard = {rank: LastSign() for rank in self.peers}
        self._sent: dict[int, tuple[Any, bytes, LastSign]] = {}

    def gather(self, message: msgspec.Struct) -> list[Any]:
        """Every rank's message, all of one kind, in rank order; collective, and blocks.

        Raises:
            PeerError: on every rank, names one that sends something else.
        """
        data, longest = pack(message), bytearray(8)
        number = [len(data).to_bytes(8, "little"), self.mpi.UINT64_T]
        self.world.Allreduce(number, [longest, self.mpi.UINT64_T], op=self.mpi.MAX)
        size = int.from_bytes(longest, "little")
        whole = bytearray(size * self.size)
        self.world.Allgather([data.ljust(size), self.mpi.BYTE], [whole, self.mpi.BYTE])
        self._heard = {rank: LastSign() for rank in self.peers}
        starts = range(0, len(whole), size)
        return [unpack(whole[at : at + size], type(message), rank) for rank, at in enumerate(starts)]

    def say(self, to: int, message: Message) -> bool:
        """Tell a rank, unless it was told the same less than BEAT seconds ago, or MPI still sends what it was told
        before; to be called again and again.

        Returns:
            Whether MPI has sent the message.
        """
        data = pack(message)
        request, last, sign = self._sent.get(to, (None, b"", LastSign()))
        if request is not None and not request.Test():
            return False
        if data == last and sign.silence < BEAT:
            return True
        self._sent[to] = self.world.Isend([data, self.mpi.BYTE], dest=to), data, LastSign()
        return False

    def receive(self) -> list[tuple[int, M]]:
        """(rank, message) of everything that has come since the last call.

        Raises:
            PeerError: names a rank that sends what is not a message, or one that is too large; what came before it is
                lost.
        """
        found: list[tuple[int, M]] = []
        status = self.mpi.Status()
        while self.world.Iprobe(status=status):
            size, source = status.Get_count(self.mpi.BYTE), status.Get_source()
            if size > MAX_MESSAGE:
                raise PeerError(f"MPI rank {source} sends a message of {size} bytes, {MAX_MESSAGE} are allowed", MEND)
            buffer = bytearray(size)
            self.world.Recv([buffer, self.mpi.BYTE], source=source)
            found.append((source, unpack(buffer, self._understood, source)))
            self._heard[source].heard()
        return found

    def silent(self) -> list[int]:
        """The peers that have not been heard for DEAD seconds; the caller must also receive."""
        return [rank for rank, sign in self._heard.items() if sign.silence > DEAD]

    def close(self, last: Message) -> bool:
        """Say a last message and take what is still under way, so that MPI can end: some implementations wait for ever
        for a message that was not received.  Collective.

        Returns:
            False if the others do not come to it within PART seconds, a peer is gone, or one says what is no message.
        """
        deadline, barrier = Deadline(PART), None
        while True:
            try:
                self.receive()
            except PeerError:
                return False
            if barrier is None:
                said = [self.say(rank, last) for rank in self.peers]
                barrier = self.world.Ibarrier() if all(said) else None
            elif barrier.Test():
                return True
            if self.silent() or deadline.over:
                return False
            time.sleep(0.005)
