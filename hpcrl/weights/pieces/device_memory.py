"""Memory that another process of this host opens by a name of 64 bytes: what --weight-transfer ipc needs of a device.

    block = memory.allocate(size); name = memory.name(block)     # the owner
    block = memory.open(name, size); ...; memory.close(block)    # every other process
    settle(memory, seconds)                                      # until the device has done what this process gave it

CudaMemory is a GPU's, by CUDA IPC; it has run on no GPU yet.  HostMemory does the same with memory of the host, which
is how the protocol above it (ipc_transport.py) runs in tests.

CudaMemory calls functions of CUDA's runtime (CUDA Runtime API, 6.11 "Device Management": cudaIpcGetMemHandle,
cudaIpcOpenMemHandle, cudaIpcCloseMemHandle, and cudaMalloc, cudaGetErrorString) in the libcudart that torch has loaded
into this process.

    A block is allocated by cudaMalloc and not by torch: a handle names a whole allocation, so that of a torch tensor
    would name the segment around it, and expandable segments have no handles.
    A handle is opened on the process's own device, whichever device the memory is on: peer access is then enabled, and
    that device need not be visible here (CUDA Runtime API, cudaIpcOpenMemHandle).
    What is opened is closed before its owner may free it; as the owner never frees, no order is needed.

Invariants: a name is plain bytes, never unpickled; what was opened is not written to; no wait is
unbounded; the device of every call is the one that was asked for, whatever the thread's current one is.
"""

from __future__ import annotations

import ctypes
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from hpcrl.errors import DeadlineError, PeerError
from hpcrl.utils.untrusted_files import read_system
from hpcrl.utils.waiting import Deadline
from hpcrl.weights.pieces.device_transport import PAUSE, DeviceEvent
from hpcrl.weights.shared_memory import Region, open_region

NAME_BYTES = 64  #: of a name; CUDA_IPC_HANDLE_SIZE
_PLACE = struct.Struct("<qqq")  # of a region: process, descriptor, inode


@dataclass(frozen=True)
class Block:
    """Memory.

    Attributes:
        buffer: uint8 [bytes] over it.
        owner: what keeps it, of the implementation's own kind.
    """

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
        """Another process's, which is at `place`; a second time only after `close`."""

    def close(self, block: Block) -> None:
        """Give up one that was opened; no tensor over it is used after that."""

    def mark(self) -> DeviceEvent:
        """What this process has given the device so far."""


def settle(memory: DeviceMemory, seconds: float) -> None:
    """Return once the device has done what this process gave it.

    Raises:
        DeadlineError: after `seconds`.
    """
    done = memory.mark()
    end = Deadline(seconds)
    while not done.query():
        if end.over:
            raise DeadlineError(f"the device {memory.place} did not copy weights within {seconds:g} s")
        time.sleep(PAUSE)


class CompletedEvent:
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
        """Raise ValueError if it is not the name of a region, OSError if that cannot be opened."""
        pid, fd, inode = _PLACE.unpack_from(name)
        return Block(open_region({"pid": pid, "fd": fd, "inode": inode, "size": size}))

    def close(self, block: Block) -> None:
        """The mapping goes with its last tensor."""

    def mark(self) -> DeviceEvent:
        return CompletedEvent()


LAZY_PEER_ACCESS = 1  #: cudaIpcMemLazyEnablePeerAccess
FIX = "use --weight-transfer shm"


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t"""

    _fields_ = (("reserved", ctypes.c_ubyte * NAME_BYTES),)


_Pointer = ctypes.POINTER(ctypes.c_void_p)
_ARGUMENTS = {
    "cudaMalloc": (_Pointer, ctypes.c_size_t),
    "cudaIpcGetMemHandle": (ctypes.POINTER(_Handle), ctypes.c_void_p),
    "cudaIpcOpenMemHandle": (_Pointer, _Handle, ctypes.c_uint),
    "cudaIpcCloseMemHandle": (ctypes.c_void_p,),
}


def loaded_runtime() -> str:
    """The path of the libcudart of this process.

    Raises:
        PeerError: if it has none.
    """
    for line in read_system("/proc/self/maps").splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcudart"):
            return path
    raise PeerError("torch has loaded no libcudart into this process, which CUDA IPC needs", FIX)


class Runtime:
    """The functions of a libcudart, on addresses.

    Raises:
        PeerError: with CUDA's own words where one fails.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        for name, types in _ARGUMENTS.items():
            function = getattr(self._library, name)
            function.argtypes = types
            function.restype = ctypes.c_int
        self._library.cudaGetErrorString.argtypes = (ctypes.c_int,)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            text = self._library.cudaGetErrorString(code).decode(errors="replace")
            raise PeerError(f"{name} failed: {text} (error {code})", FIX)

    def allocate(self, size: int) -> int:
        """cudaMalloc"""
        found = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(found), size)
        return found.value or 0

    def handle(self, address: int) -> bytes:
        """cudaIpcGetMemHandle"""
        found = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(found), address)
        return bytes(found)

    def open(self, handle: bytes) -> int:
        """cudaIpcOpenMemHandle"""
        found = ctypes.c_void_p()
        self._call("cudaIpcOpenMemHandle", ctypes.byref(found), _Handle.from_buffer_copy(handle), LAZY_PEER_ACCESS)
        return found.value or 0

    def close(self, address: int) -> None:
        """cudaIpcCloseMemHandle"""
        self._call("cudaIpcCloseMemHandle", address)


def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """uint8 [size] over memory that is not torch's, and is not freed with it."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class CudaMemory:
    """The memory of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.place = place_of(device)
        self._runtime = Runtime(loaded_runtime())

    def allocate(self, size: int) -> Block:
        with torch.cuda.device(self.device):
            address = self._runtime.allocate(size)
        return Block(tensor_at(address, size, self.device), address)

    def name(self, block: Block) -> bytes:
        assert isinstance(block.owner, int)
        with torch.cuda.device(self.device):
            return self._runtime.handle(block.owner)

    def open(self, name: bytes, size: int, place: str) -> Block:
        """Raise PeerError where this GPU cannot reach that one."""
        for number in range(torch.cuda.device_count()):
            there = torch.device("cuda", number)
            if place_of(there) == place != self.place and not torch.cuda.can_device_access_peer(self.device, there):
                raise PeerError(f"GPU {self.place} cannot read the memory of GPU {place}", FIX)
        with torch.cuda.device(self.device):
            address = self._runtime.open(name)
        return Block(tensor_at(address, size, self.device), address)

    def close(self, block: Block) -> None:
        assert isinstance(block.owner, int)
        with torch.cuda.device(self.device):
            self._runtime.close(block.owner)

    def mark(self) -> DeviceEvent:
        with torch.cuda.device(self.device):
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream())
        return done


def place_of(device: torch.device) -> str:
    """The UUID of a GPU: numbers differ between processes with other CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid)
