"""Messages whose bytes are on GPUs: those of a round go together as one NCCL group; control messages go over gloo.

    transport = DeviceTransport(group, me, ranks, seconds, wire)
    transport.send(buffer, to, DATA); ...; transport.flush()

Every member starts one group for each round in which it takes part, in the order of rounds, and what two members have
for one another is in the same group of both: so no order of groups waits for itself, however few run at a time.  The
wire is NcclWire, which uses vLLM's own binding of NCCL at both ends; rank 0 creates NCCL's unique id and sends it under
each engine's key.  It has run on no GPU yet; the tests use a wire of gloo, which
runs groups strictly one after another, as a stream does.

Invariants: nothing is sent before `flush`; groups start on the stream on which tensors are packed and loaded, so only
the device waits for them; every wait checks the deadline and whether a member has left; a member that leaves says so
where all others look.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch

from hpcrl.engine.membership.broadcast import in_thread
from hpcrl.errors import PeerError
from hpcrl.utils.waiting import Deadline
from hpcrl.weights.pieces.peer_transport import GLANCE, LEFT, PeerTransport, Transfer, named
from hpcrl.weights.pieces.wire import DATA

PAUSE = 5e-4  #: seconds between two looks at the device


class DeviceEvent(Protocol):
    """A group under way; torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether it has ended; at once."""


class Wire(Protocol):
    """What carries bytes between members' devices."""

    device: torch.device

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> DeviceEvent:
        """Start one group, (uint8 tensor on the device, member) each, behind what the device was given before."""

    def close(self) -> None:
        """Abort what is under way."""


@dataclass
class _Part:
    """A send or receive of a group; its work, as gloo's."""

    transport: DeviceTransport
    done: DeviceEvent | None = None

    def wait(self, limit: timedelta) -> None:
        """RuntimeError at the limit, PeerError when a member has left."""
        assert self.done is not None, "flush() comes first"
        end = Deadline(limit.total_seconds())
        look = time.monotonic() + GLANCE
        while not self.done.query():
            now = time.monotonic()
            if end.over:
                raise RuntimeError("timed out")
            if now > look:
                look = now + GLANCE
                self.transport.check()
            time.sleep(PAUSE)


@dataclass
class DeviceMessageMemory:
    """Memory on a device; only its owner can open it, unless `wire` says how."""

    buffer: torch.Tensor
    wire: dict[str, Any] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        return self.wire

    def close(self) -> None:
        self.buffer = self.buffer[:0]


@dataclass
class DeviceTransport(PeerTransport):
    """As `PeerTransport`, with the bytes of messages on the wire's device."""

    wire: Wire | None = None
    _sends: list[tuple[torch.Tensor, int, _Part]] = field(default_factory=list)
    _receives: list[tuple[torch.Tensor, int, _Part]] = field(default_factory=list)

    @property
    def may_borrow(self) -> bool:
        return False

    @property
    def device(self) -> torch.device:
        assert self.wire is not None
        return self.wire.device

    def allocate(self, size: int) -> DeviceMessageMemory:
        return DeviceMessageMemory(torch.empty(size, dtype=torch.uint8, device=self.device))

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
        """Start what was collected as one group.

        Raises:
            PeerError: if the wire has failed, or was given up.
        """
        sends = self._sends
        receives = self._receives
        self._sends = []
        self._receives = []
        if not sends and not receives:
            return
        if self.wire is None:
            raise PeerError("the weight group was closed")
        with named("exchanging weights", self.seconds):
            done = self._started(self.wire, [pair[:2] for pair in sends], [pair[:2] for pair in receives])
        for *_, part in (*sends, *receives):
            part.done = done

    def _started(
        self, wire: Wire, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> DeviceEvent:
        """The group under way.

        The first one of two members connects them, inside NCCL's call, for as long as it takes the other to come.  So
        it is made in a thread, which `close` ends by aborting the wire; RuntimeError at the deadline, PeerError when a
        member has left.
        """
        stream = torch.cuda.current_stream(wire.device) if wire.device.type == "cuda" else None

        def start() -> DeviceEvent:
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
                return wire.exchange(sends, receives)

        starting = in_thread(start)
        end = Deadline(self.seconds)
        while wait([starting], timeout=GLANCE).not_done:
            if end.over:
                raise RuntimeError("timed out")
            self.check()
        return starting.result()

    def check(self) -> None:
        """Raise PeerError if a member has left."""
        if self.group.group is None or self.group.store.check([LEFT]):
            raise PeerError("a member left")

    def leave(self) -> None:
        if self.group.group is None:
            return
        with contextlib.suppress(RuntimeError):  # the store may have gone with rank 0
            self.group.store.set(LEFT, str(self.me))
        wire = self.wire
        self.wire = None
        if wire is not None:
            wire.close()
        super().leave()


def unique_id() -> bytes:
    """A new name for a group, 128 bytes of NCCL's, which holds where its members meet and the secret that they show
    there."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils.nccl import unpinned_nccl_env

    with unpinned_nccl_env():
        return bytes(memoryview(NCCLLibrary().ncclGetUniqueId().internal))


class NcclWire:
    """Member `rank` of `world`.

    Attributes:
        name: NCCL's, 128 bytes.
    """

    def __init__(self, name: bytes, rank: int, world: int, device: torch.device) -> None:
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        with torch.cuda.device(device):
            self.device = device
            self.communicator = uid_init_process_group(name, rank, world, device)

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> Any:
        with torch.cuda.device(self.device):  # another thread begins on GPU 0
            stream = torch.cuda.current_stream()
            done = torch.cuda.Event()
            self.communicator.group_start()
            try:
                for tensor, member in sends:
                    self.communicator.send(tensor, member, stream)
                for tensor, member in receives:
                    self.communicator.recv(tensor, member, stream)
            finally:
                self.communicator.group_end()
            done.record(stream)
        return done

    def close(self) -> None:
        self.communicator.destroy()  # aborts, and waits 5 s for that at most
