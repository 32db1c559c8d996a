"""Messages between members of a resharded update: sends and receives of a gloo group, each with a deadline.

Invariant: nothing waits longer than `seconds`; what a pending transfer reads or writes is kept until it has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch

from hpcrl.errors import DeadlineError, PeerError
from hpcrl.weights.gloo_group import GlooGroup
from hpcrl.weights.shared_memory import Region, open_region

LEAVING = 99  #: a kind of message that is never sent
LATE = ("timed out", "timeout")  #: gloo's words


@dataclass
class Transfer:
    """One send or receive under way.

    Attributes:
        what: for the error.
    """

    work: Any
    tensor: torch.Tensor
    what: str
    seconds: float

    def wait(self) -> torch.Tensor:
        """Its tensor, once it has ended.  DeadlineError or PeerError say who did not take part."""
        with named(self.what, self.seconds):
            self.work.wait(timedelta(seconds=self.seconds))
        return self.tensor


class MessageMemory(Protocol):
    """Memory of a member; `Region` is one."""

    buffer: torch.Tensor

    @property
    def size(self) -> int: ...

    def to_wire(self) -> dict[str, Any]:
        """How others of this host open it."""

    def close(self) -> None: ...


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
    _token: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.uint8))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        """Begin to send a contiguous uint8 tensor."""
        what = f"sending weights to {self._name(to)}"
        with named(what, self.seconds):
            return Transfer(self.group.group.send([tensor], to, tag), tensor, what, self.seconds)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        """Begin to receive one into `tensor`."""
        what = f"receiving weights from {self._name(source)}"
        with named(what, self.seconds):
            return Transfer(self.group.group.recv([tensor], source, tag), tensor, what, self.seconds)

    def tell(self, to: int, tag: int, counts: torch.Tensor | None = None) -> Transfer:
        """Begin to send a control message: empty, or change counts (int32)."""
        return self.send(self._token if counts is None else counts.view(torch.uint8), to, tag)

    def hear(self, source: int, tag: int, pieces: int = 0) -> Transfer:
        """Begin to receive one.

        Args:
            pieces: how many the message with these change counts has, 0: there are none.
        """
        return self.receive(torch.zeros(max(1, 4 * pieces), dtype=torch.uint8), source, tag)

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

    def show(self, name: str, text: str) -> None:
        """Let all members read a text under a name."""
        self.group.store.set(name, text)

    def read(self, name: str) -> str:
        """What a member shows under a name, once it does."""
        return self.group.store.get(name).decode()

    def _name(self, member: int) -> str:
        return f"trainer rank {member}" if member < self.ranks else f"engine worker {member - self.ranks}"

    def close(self) -> None:
        """Leave the group: what is under way here fails, and members that wait for this one get an error."""
        if self.group.group is None:
            return
        other = 0 if self.me else 1
        with contextlib.suppress(
            RuntimeError
        ):  # a wait that comes to its end has gloo close all connections of a member
            self.group.group.recv([torch.zeros(1, dtype=torch.uint8)], other, LEAVING).wait(timedelta(milliseconds=1))
        self.group.close()
