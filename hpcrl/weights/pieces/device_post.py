"""Messages whose bytes lie on GPUs: those of a round go together as one group over a wire of their own, NCCL's; words
go over gloo.

    post = DevicePost(group, me, ranks, seconds, wire)
    post.send(buffer, to, DATA); ...; post.flush()

Every member starts one group for each round in which it takes part, in the order of rounds, and what two members have
for one another is in the same group of both: so no order of groups waits for itself, however few run at a time.  A wire
is NcclWire (nccl_wire.py), which has run on no GPU yet; the tests have one of gloo, which runs groups strictly one
after another, as a stream does.

Invariants: nothing is sent before `flush`; every wait looks at the deadline and at whether somebody has left, and no
call waits for the device; who leaves says so where all others look.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch

from hpcrl.errors import PeerError
from hpcrl.weights.pieces.post import Post, Transfer, named
from hpcrl.weights.pieces.wire import DATA

LEFT = "somebody left"  #: the key under which a member says so
GLANCE = 0.5  #: seconds between two looks at it
PAUSE = 5e-4  #: seconds between two looks at the device


class Done(Protocol):
    """A group under way; torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether it has ended; at once."""


class Wire(Protocol):
    """What carries bytes between members' devices."""

    device: torch.device

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> Done:
        """Start one group, (uint8 tensor on the device, member) each, behind what the device was given before."""

    def close(self) -> None:
        """Give up what is under way."""


@dataclass
class _Part:
    """A send or receive of a group; its work, as gloo's."""

    post: DevicePost
    done: Done | None = None

    def wait(self, limit: timedelta) -> None:
        """RuntimeError at the limit, PeerError when somebody has left."""
        assert self.done is not None, "flush() comes first"
        end = time.monotonic() + limit.total_seconds()
        look = time.monotonic() + GLANCE
        while not self.done.query():
            now = time.monotonic()
            if now > end:
                raise RuntimeError("timed out")
            if now > look:
                look = now + GLANCE
                self.post.check()
            time.sleep(PAUSE)


@dataclass
class DeviceRoom:
    """Memory on a device; only its owner can open it."""

    buffer: torch.Tensor

    @property
    def size(self) -> int:
        return self.buffer.numel()

    def to_wire(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.buffer = self.buffer[:0]


@dataclass
class DevicePost(Post):
    """As `Post`, with the bytes of messages on the wire's device."""

    wire: Wire | None = None
    _sends: list[tuple[torch.Tensor, int, _Part]] = field(default_factory=list)
    _receives: list[tuple[torch.Tensor, int, _Part]] = field(default_factory=list)

    @property
    def lends(self) -> bool:
        return False

    @property
    def device(self) -> torch.device:
        assert self.wire is not None
        return self.wire.device

    def room(self, size: int) -> DeviceRoom:
        return DeviceRoom(torch.empty(size, dtype=torch.uint8, device=self.device))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        return (
            self._later(self._sends, tensor, to, f"sending weights to {self._name(to)}")
            if tag == DATA
            else super().send(tensor, to, tag)
        )

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        if tag != DATA:
            return super().receive(tensor, source, tag)
        return self._later(self._receives, tensor, source, f"receiving weights from {self._name(source)}")

    def _later(
        self, found: list[tuple[torch.Tensor, int, _Part]], tensor: torch.Tensor, member: int, what: str
    ) -> Transfer:
        part = _Part(self)
        found.append((tensor, member, part))
        return Transfer(part, tensor, what, self.seconds)

    def flush(self) -> None:
        """Start what was collected as one group.  PeerError if the wire has failed, or was given up."""
        sends, receives = self._sends, self._receives
        self._sends = []
        self._receives = []
        if not sends and not receives:
            return
        if self.wire is None:
            raise PeerError("the group for weights was left")
        with named("exchanging weights", self.seconds):
            done = self.wire.exchange([pair[:2] for pair in sends], [pair[:2] for pair in receives])
        for *_, part in (*sends, *receives):
            part.done = done

    def check(self) -> None:
        """PeerError if a member has left."""
        if self.group.group is None or self.group.store.check([LEFT]):
            raise PeerError("a member left")

    def close(self) -> None:
        if self.group.group is None:
            return
        with contextlib.suppress(RuntimeError):  # the store may have gone with rank 0
            self.group.store.set(LEFT, str(self.me))
        wire = self.wire
        self.wire = None
        if wire is not None:
            wire.close()
        super().close()
