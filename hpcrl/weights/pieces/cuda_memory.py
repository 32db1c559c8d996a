"""A GPU's memory that other processes of this host open by CUDA IPC.  This module has run on no GPU yet.

Five functions of CUDA's runtime (CUDA Runtime API, 6.11 "Device Management": cudaIpcGetMemHandle, cudaIpcOpenMemHandle,
cudaIpcCloseMemHandle, and cudaMalloc, cudaGetErrorString), from the libcudart that torch has loaded into this process.

    A block is allocated by cudaMalloc and is not torch's: a handle names a whole allocation, so of a tensor of torch's it would name
    the segment around it, and of expandable segments there are none.
    A handle is opened on the own device, whichever device the memory is on: peer access is enabled then, and that device need not be
    visible here (CUDA Runtime API, cudaIpcOpenMemHandle).
    What is opened is closed before its owner may free it; as the owner never frees, no order is needed.

Invariants: those of device_memory.py; the device of every call is the one that was asked for, whatever the thread's is.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from hpcrl.errors import PeerError
from hpcrl.weights.pieces.device_memory import NAME_BYTES, Block
from hpcrl.weights.pieces.device_post import Done

LAZY_PEER_ACCESS = 1  #: cudaIpcMemLazyEnablePeerAccess
MEND = "use --weight-transfer shm"


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
    """The path of the libcudart of this process.  PeerError if it has none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcudart"):
            return path
    raise PeerError("torch has loaded no libcudart into this process, which CUDA IPC needs", MEND)


class Runtime:
    """The functions of a libcudart, on addresses; PeerError with CUDA's own words where one fails."""

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
            raise PeerError(f"{name} failed: {text} (error {code})", MEND)

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
        """PeerError where this GPU cannot reach that one."""
        for number in range(torch.cuda.device_count()):
            there = torch.device("cuda", number)
            if place_of(there) == place != self.place and not torch.cuda.can_device_access_peer(self.device, there):
                raise PeerError(f"GPU {self.place} cannot read the memory of GPU {place}", MEND)
        with torch.cuda.device(self.device):
            address = self._runtime.open(name)
        return Block(tensor_at(address, size, self.device), address)

    def close(self, block: Block) -> None:
        assert isinstance(block.owner, int)
        with torch.cuda.device(self.device):
            self._runtime.close(block.owner)

    def mark(self) -> Done:
        with torch.cuda.device(self.device):
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream())
        return done


def place_of(device: torch.device) -> str:
    """The UUID of a GPU: numbers differ between processes with other CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid)
