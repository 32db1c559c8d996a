"""Small facts that one trainer rank knows and all must act upon.

Invariant: bytes travel as uint8 tensors; nothing is pickled.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist


def device() -> torch.device:
    """Where tensors of a collective must lie: CUDA with NCCL, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def broadcast_bytes(data: bytes | None, source: int = 0, group: dist.ProcessGroup | None = None) -> bytes:
    """`data` of the rank with global number `source`, on every rank of `group` (default: all); collective."""
    if dist.get_world_size(group) == 1:
        assert data is not None
        return data
    mine = dist.get_rank() == source
    size = torch.tensor([len(data) if mine and data is not None else 0], dtype=torch.int64, device=device())
    dist.broadcast(size, source, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device())
    if mine and data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, source, group=group)
    return buffer.cpu().numpy().tobytes()


def broadcast_json(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """A JSON value of rank `source`, on every rank of `group`; collective."""
    data = msgspec.json.encode(value) if dist.get_rank() == source else None
    return msgspec.json.decode(broadcast_bytes(data, source, group))
