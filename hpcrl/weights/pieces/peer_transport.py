"""Messages between members of an update: sends and receives of a gloo group, each with a deadline.

A member that waits for another learns of its end from gloo only where its own connection to it breaks, and of a send
that was written in part not even then (torch 2.13: it waits until its timeout).  So during an update each member looks
at the store now and then: one that fails leaves a sign there, and the store itself ends with rank 0's part in the
update.  A send is waited for by a thread, which is left behind if that comes.

Invariant: nothing waits longer than `seconds`, and no longer than some seconds once a member has left; what a pending
transfer reads or writes is kept until it has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hpcrl.engine.membership.broadcast import in_thread
from hpcrl.errors import DeadlineError, PeerError
from hpcrl.transport.torch_store import connect_store
from hpcrl.weights.pieces.wire import DATA
from hpcrl.weights.shared_memory import Region, open_region

LEAVING = 99  #: a kind of message that is never sent
LATE = ("timed out", "timeout")  #: gloo's words
LEFT = "a member left"  #: the key under which a member says so
GLANCE = 0.5  #: seconds between two looks at it; of many members more
END = 10.0  #: seconds that the look under way may take
MEMBERS = 200  #: that may look within a second


@dataclass
class GlooGroup:
    """A joined group: the trainer's ranks come first; `close` leaves it.

    Attributes:
        watched: the store over another connection, for a thread: a call of torch's store waits for those before it.
    """

    store: Any
    group: Any
    watched: Any = None

    def close(self) -> None:
        self.group = self.store = self.watched = None


def join_group(host: str, port: int, rank: int, world: int, own_host: str, seconds: float) -> GlooGroup:
    """Join the group that meets in the store at host:port.

    Args:
        own_host: the address that this process's connections use.

    Returns:
        When all `world` members are there; torch raises its own error after `seconds`.
    """
    limit = timedelta(seconds=seconds)
    store = connect_store(host, port, seconds)
    options = dist.ProcessGroupGloo._Options()
    # gloo crashes if one member connects at the start and another at its first message: TORCH_GLOO_LAZY_INIT, which may
    # differ between their processes, is not read
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host, lazy_init=False)]
    options._timeout = limit
    meeting = dist.PrefixStore("hpcrl-weights", store)
    return GlooGroup(store, dist.ProcessGroupGloo(meeting, rank, world, options), store.clone())


@dataclass
class Transfer:
    """One send or receive under way.

    Attributes:
        what: for the error.
        left: set when this member leaves the group.
        apart: gloo may not end it then, so a thread waits for it.
    """

    work: Any
    tensor: torch.Tensor
    what: str
    seconds: float
    left: threading.Event = field(default_factory=threading.Event)
    apart: bool = False

    def wait(self) -> torch.Tensor:
        """Its tensor, once it has ended.  DeadlineError or PeerError say who did not take part."""
        with named(self.what, self.seconds):
            try:
                (self._wait_apart if self.apart else self._finish)()
            except RuntimeError as error:
                if self.left.is_set():
                    raise RuntimeError("a member left") from error
                raise
        return self.tensor

    def _wait_apart(self) -> None:
        ending = in_thread(self._finish)
        while wait([ending], timeout=GLANCE).not_done:
            if self.left.is_set():
                raise RuntimeError("a member left")
        ending.result()

    def _finish(self) -> None:
        self.work.wait(timedelta(seconds=self.seconds))


class MessageMemory(Protocol):
    """Memory of a member; `Region` is one."""

    buffer: torch.Tensor

    def to_wire(self) -> dict[str, Any]:
        """How others of this host open it."""

    def close(self) -> None: ...


def has_left(store: Any) -> bool:
    """Whether a member of the group that meets in a store has left, or the store has ended."""
    try:
        return store.check([LEFT])
    except RuntimeError:
        return True


@contextlib.contextmanager
def named(what: str, seconds: float) -> Iterator[None]:
    """Turn gloo's errors into DeadlineError and PeerError."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        if any(word in text.lower() for word in LATE):
            raise DeadlineError(f"{what} did not end within {seconds:.0f} s") from error
        raise PeerError(f"{what} failed: {text}") from error


@dataclass
class PeerTransport:
    """The members of an update as one of them sees them: member number `me` of a group."""

    group: GlooGroup
    me: int
    ranks: int
    seconds: float
    _left: threading.Event = field(default_factory=threading.Event)
    _active: threading.Event = field(default_factory=threading.Event)
    _watch: threading.Thread | None = None
    _token: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.uint8))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        """Begin to send a contiguous uint8 tensor."""
        what = f"sending weights to {self._name(to)}"
        with named(what, self.seconds):
            work = self._open_group().send([tensor], to, tag)
        return Transfer(work, tensor, what, self.seconds, self._left, tag == DATA)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        """Begin to receive one into `tensor`."""
        what = f"receiving weights from {self._name(source)}"
        with named(what, self.seconds):
            return Transfer(self._open_group().recv([tensor], source, tag), tensor, what, self.seconds, self._left)

    def tell(self, to: int, tag: int) -> Transfer:
        """Begin to send a control message, which is empty."""
        return self.send(self._token, to, tag)

    def hear(self, source: int, tag: int) -> Transfer:
        """Begin to receive one."""
        return self.receive(torch.zeros(1, dtype=torch.uint8), source, tag)

    @property
    def may_borrow(self) -> bool:
        """Whether what was copied out of a message's memory has been read when the call that copies it returns."""
        return True

    @property
    def device(self) -> torch.device:
        """Where the bytes of messages are."""
        return torch.device("cpu")

    def allocate(self, size: int) -> MessageMemory:
        """Memory for messages; others of this host may open it."""
        return Region(size)

    def open(self, wire: Mapping[str, Any]) -> torch.Tensor:
        """Another member's memory, as `MessageMemory.to_wire` describes it: uint8, not to be written to.

        Raises:
            ValueError, OSError: if it is not that.
        """
        return open_region(wire)

    def settle(self) -> None:
        """Return once the device has done what this member gave it.

        Raises:
            DeadlineError: after `seconds`.
        """

    def flush(self) -> None:
        """Start the sends and receives that were collected, for transports that collect them."""

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Around an update: ends it for all members where it fails for one.

        Raises:
            PeerError: if another member has left.
        """
        self._open_group()
        if self._watch is None:
            self._watch = threading.Thread(target=self._watch_peers, args=(self.group.watched,), daemon=True)
            self._watch.start()
            atexit.register(self._end_watch)
        store = self.group.store
        self._active.set()
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the store may have gone with rank 0
                store.set(LEFT, str(self.me))
            raise
        finally:
            self._active.clear()

    def _watch_peers(self, store: Any) -> None:
        """Until this member leaves: leave once another has, or the store has ended, in the middle of an update."""
        while (group := self.group.group) is not None and not self._left.wait(max(GLANCE, group.size() / MEMBERS)):
            if self._active.is_set() and has_left(store):
                self.leave()  # memory stays open: the update's own thread may be reading it

    def _open_group(self) -> Any:
        if self.group.group is None:
            raise PeerError("the weight group was closed")
        return self.group.group

    def show(self, name: str, text: str) -> None:
        """Let all members read a text under a name."""
        self.group.store.set(name, text)

    def read(self, name: str) -> str:
        """What a member shows under a name, once it does."""
        return self.group.store.get(name).decode()

    def _name(self, member: int) -> str:
        return f"trainer rank {member}" if member < self.ranks else f"engine worker {member - self.ranks}"

    def close(self) -> None:
        """Leave the group and give up what of others' memory was opened; called by who uses it."""
        self.leave()

    def leave(self) -> None:
        """Leave the group: what is under way here fails, and members that wait for this one get an error.  From any
        thread."""
        group = self.group.group
        if group is None:
            return
        self._left.set()
        if group.size() > 1:  # gloo does not check that there is a member of that number
            other = 0 if self.me else 1
            with contextlib.suppress(RuntimeError):  # a wait that comes to its end has gloo close all connections
                group.recv([torch.zeros(1, dtype=torch.uint8)], other, LEAVING).wait(timedelta(milliseconds=1))
        self.group.close()
        atexit.unregister(self._end_watch)
        self._end_watch()

    def _end_watch(self) -> None:
        """A thread that waits in the store when the interpreter ends would abort the process."""
        self._left.set()
        if self._watch is not None and self._watch is not threading.current_thread():
            self._watch.join(END)
