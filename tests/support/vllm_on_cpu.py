"""vLLM's NCCL weight transfer without GPUs: gloo carries the broadcasts, and streams do nothing.

Trainer class, worker class, packing and loading are vLLM's own.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hpcrl.transport.torch_store import open_store
from hpcrl.weights import gloo_group, update_backend, vllm_transfer

HERE = "127.0.0.1"
LIMIT = 60.0
_stores: list[Any] = []  # as long as this process lives


class GlooCommunicator:
    """In place of vLLM's PyNcclCommunicator."""

    def __init__(self, name: bytes, rank: int, world: int, device: Any) -> None:
        self.group: Any = gloo_group.join(HERE, int(name), rank, world, HERE, LIMIT).group

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        how = dist.BroadcastOptions()
        how.rootRank = src
        self.group.broadcast([tensor], how).wait()

    def destroy(self) -> None:
        self.group = None


def unique_id() -> bytes:
    """128 bytes, as NCCL's: the port of a store."""
    _stores.append(open_store(HERE))
    return f"{_stores[-1].port:>128}".encode()


def install() -> None:
    """In this process, from now on."""
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    nccl_common.uid_init_process_group = GlooCommunicator
    packed_tensor._get_streams = lambda device, count: (stream,) * count
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = lambda device=None: stream
    torch.accelerator.current_device_index = lambda: 0
    vllm_transfer.unique_id = unique_id
    obstacle = update_backend.transfer_obstacle
    update_backend.transfer_obstacle = lambda transfer, site: None if transfer == "vllm" else obstacle(transfer, site)
