"""Memory that another process of this host opens by a name of 64 bytes: what --weight-transfer ipc asks of a device.

    block = memory.allocate(size); name = memory.name(block)     # the owner
    block = memory.open(name, size); ...; memory.close(block)    # everybody else
    settle(memory, seconds)                                      # until the device has done what this process gave it

A GPU's is cuda_memory.py.  Where there is none, HostMemory does the same with memory of the host, which is how the
protocol above it (ipc_post.py) runs in tests.

Invariants: a name is plain bytes, of which nothing is unpickled; what was opened is not written to; no wait is for
ever.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from hpcrl.errors import DeadlineError
from hpcrl.weights.pieces.device_post import PAUSE, Done
from hpcrl.weights.shared_memory import Region, open_region

NAME_BYTES = 64  #: of a name; CUDA_IPC_HANDLE_SIZE
_PLACE = struct.Struct("<qqq")  # of a region: process, descriptor, inode


@dataclass(frozen=True)
class Block:
    """Memory.  buffer: uint8 [bytes] over it; owner: what keeps it, of the implementation's own kind."""

    buffer: torch.Tensor
    owner: object = None


class DeviceMemory(Protocol):
    """Memory of one device.  What the device itself refuses is a PeerError."""

    @property
    def device(self) -> torch.device: ...

    @property
    def place(self) -> str:
        """Which device of the world this is, whatever number it has in a process."""

    def allocate(self, size: int) -> Block:
        """New memory, never given back before the process ends: others may have it open."""

    def name(self, block: Block) -> bytes:
        """Of one that was allocated here: NAME_BYTES bytes."""

    def open(self, name: bytes, size: int, place: str) -> Block:
        """Another process's, which lies at `place`; a second time only after `close`."""

    def close(self, block: Block) -> None:
        """Give up one that was opened; no tensor over it is used after that."""

    def mark(self) -> Done:
        """What this process has given the device so far."""


def settle(memory: DeviceMemory, seconds: float) -> None:
    """Return once the device has done what this process gave it; DeadlineError after `seconds`."""
    done, end = memory.mark(), time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > end:
            raise DeadlineError(f"the device {memory.place} did not copy weights within {seconds:g} s")
        time.sleep(PAUSE)


class Ended:
    """What was given to a device that does everything at once."""

    def query(self) -> bool:
        return True


class HostMemory:
    """As of a device, in the host's memory (`Region`)."""

    device = torch.device("cpu")
    place = "host"

    def allocate(self, size: int) -> Block:
        region = Region(size)
        return Block(region.buffer, region)

    def name(self, block: Block) -> bytes:
        assert isinstance(block.owner, Region), "it was opened, not allocated"
        wire = block.owner.to_wire()
        return _PLACE.pack(wire["pid"], wire["fd"], wire["inode"]).ljust(NAME_BYTES, b"\0")

    def open(self, name: bytes, size: int, place: str) -> Block:
        """ValueError if it is no name of a region, OSError if that cannot be opened."""
        pid, fd, inode = _PLACE.unpack_from(name)
        return Block(open_region({"pid": pid, "fd": fd, "inode": inode, "size": size}))

    def close(self, block: Block) -> None:
        """The mapping goes with its last tensor."""

    def mark(self) -> Done:
        return Ended()
