"""Messages whose bytes stay on the device where they were packed: workers of the same host open that memory once and
copy out of it.

    transport = IpcTransport(group, me, ranks, seconds, exported_memory=ExportedMemory(memory))

Control messages go over gloo; of the bytes only the name of the memory does, once for each update group.  What workers
of another host need goes over the wire to a rank there, in whose memory they read it: NCCL takes a GPU once, so engine
workers on the trainer's GPUs cannot be members of its group, and the ranks can.  A sender says
READY once its device has packed a message, a worker says DONE once its own has copied it (`settle`), so neither touches
what the other still works on.

Invariants: nothing waits for a device longer than `seconds`; a name from the wire is checked field by field, and stays
bytes; exported memory is never freed, since other processes may have it open: it is allocated once, and the next update
group uses it again.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from hpcrl.errors import PeerError
from hpcrl.weights.pieces.device_memory import NAME_BYTES, Block, DeviceMemory, HostMemory, settle
from hpcrl.weights.pieces.device_transport import DeviceMessageMemory, DeviceTransport
from hpcrl.weights.pieces.peer_transport import Transfer
from hpcrl.weights.pieces.wire import DATA

FIX = "use --weight-transfer shm"
LEAVING = 5.0  #: seconds that a device has to end what it does when we leave


class Exported(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How others open a member's memory.

    Attributes:
        name: base64.
        size: bytes.
        place: of its device (`DeviceMemory.place`).
    """

    name: str
    size: int
    place: str


def read_exported(wire: Mapping[str, Any]) -> tuple[bytes, Exported]:
    """(the name's bytes, the rest).

    Raises:
        ValueError: says what is wrong.
    """
    try:
        found = msgspec.convert(dict(wire), Exported, strict=True)
        name = base64.b64decode(found.name, validate=True)
    except (msgspec.ValidationError, binascii.Error) as error:
        raise ValueError(f"malformed memory of a device: {error}") from error
    if len(name) != NAME_BYTES or found.size <= 0:
        raise ValueError(f"malformed memory of a device: a name of {len(name)} bytes for {found.size} bytes")
    return name, found


@dataclass
class ExportedMemory:
    """The memory that a process exports, kept from one update group to the next."""

    memory: DeviceMemory
    block: Block | None = None

    def allocate(self, size: int) -> Block:
        """At least `size` bytes."""
        if self.block is None or self.block.buffer.numel() < size:
            self.block = self.memory.allocate(size)
        return self.block


@dataclass
class IpcTransport(DeviceTransport):
    """As `DeviceTransport`, with the bytes of messages in memory of ranks that the workers of their host open; the
    wire, if there is one, is between ranks."""

    exported_memory: ExportedMemory = field(default_factory=lambda: ExportedMemory(HostMemory()))
    _opened: list[Block] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.exported_memory.memory.device

    def allocate(self, size: int) -> DeviceMessageMemory:
        memory = self.exported_memory.memory
        block = self.exported_memory.allocate(size)
        name = base64.b64encode(memory.name(block)).decode()
        wire = Exported(name, block.buffer.numel(), memory.place)
        return DeviceMessageMemory(block.buffer[:size], msgspec.to_builtins(wire))

    def open(self, wire: Mapping[str, Any]) -> torch.Tensor:
        """Raise PeerError where this device cannot reach that one."""
        name, found = read_exported(wire)
        self._opened.append(self.exported_memory.memory.open(name, found.size, found.place))
        return self._opened[-1].buffer

    def settle(self) -> None:
        settle(self.exported_memory.memory, self.seconds)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        if tag == DATA and self.wire is None:
            raise PeerError(f"{self._name(to)} is on another host, where no memory of this device can be opened", FIX)
        return super().send(tensor, to, tag)

    def close(self) -> None:
        """What is still being copied when LEAVING seconds are over stays open to the end of the process."""
        opened = self._opened
        self._opened = []
        with contextlib.suppress(PeerError):
            if opened:
                settle(self.exported_memory.memory, LEAVING)
            for block in opened:
                self.exported_memory.memory.close(block)
        super().close()
