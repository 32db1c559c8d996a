"""Memory that trainer and engines of one host share: an anonymous file that the engine maps.

The trainer makes the file with memfd_create(2) and tells the engine its own process id and the descriptor; the engine
opens /proc/PID/fd/N.  Only processes of the same user may do that, the file has no name in /dev/shm that could outlive
a killed run, and it does not count against the size of a container's /dev/shm.

Invariants: a region never shrinks (sealed), so that reading it cannot fault; the engine's mapping is read-only; what
the engine opens is checked to be such a region before it is mapped.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NAME = "hpcrl-weights"


class Region:
    """Shared memory of `size` bytes; `buffer` is a uint8 tensor over it.  Pages take memory when first written."""

    def __init__(self, size: int) -> None:
        import torch

        self.fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.fd, 0o600)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.buffer: torch.Tensor = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)

    def to_wire(self) -> dict[str, int]:
        """How another process of this host opens it."""
        return {"pid": os.getpid(), "fd": self.fd, "inode": os.fstat(self.fd).st_ino, "size": len(self.buffer)}

    def close(self) -> None:
        """Close the descriptor; the memory is freed with its last mapping."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def open_region(wire: Mapping[str, Any]) -> torch.Tensor:
    """Map another process's region: uint8 tensor, not to be written to.

    Raises:
        ValueError: if the description is malformed or names something else.
        OSError: if it cannot be opened (another host, another container, or its owner has gone).
    """
    import torch

    if set(wire) != {"pid", "fd", "inode", "size"} or not all(type(v) is int and v >= 0 for v in wire.values()):
        raise ValueError(f"malformed region: {dict(wire)!r}")
    path = f"/proc/{wire['pid']}/fd/{wire['fd']}"
    if not os.readlink(path).startswith(f"/memfd:{NAME}"):
        raise ValueError(f"{path} is not a region of weights")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or not sealed:
            raise ValueError(f"{path} is not a sealed region of hpcrl's")
        if (found.st_ino, found.st_size) != (wire["inode"], wire["size"]):
            raise ValueError(f"{path} is not the region described")
        mapped = mmap.mmap(fd, found.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nor is it meant to be
        return torch.frombuffer(mapped, dtype=torch.uint8)
