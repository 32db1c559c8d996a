"""vLLM's weight transfers without GPUs: gloo carries NCCL's broadcasts, files what CUDA IPC shares, and streams do
nothing.

Trainer class, worker class, packing and loading are vLLM's own.
"""

from __future__ import annotations

import contextlib
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from hpcrl.transport.torch_store import open_store
from hpcrl.weights import update_backend, vllm_transfer
from hpcrl.weights.pieces.peer_transport import join_group

HERE = "127.0.0.1"
LIMIT = 60.0
_stores: list[Any] = []  # as long as this process lives
_files: dict[int, str] = {}


class GlooCommunicator:
    """In place of vLLM's PyNcclCommunicator."""

    def __init__(self, name: bytes, rank: int, world: int, device: Any) -> None:
        self.group: Any = join_group(HERE, int(name), rank, world, HERE, LIMIT).group

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


def shared_buffer(nbytes: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """In place of torch.empty on a GPU: bytes in a file, whose name is the handle."""
    path = tempfile.mkstemp(prefix="hpcrl-ipc-")[1]
    buffer = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    _files[buffer.data_ptr()] = path
    return buffer


def reduce_tensor(buffer: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """In place of torch's: the arguments that `rebuild` gets, in the places of CUDA's."""
    path = _files[buffer.data_ptr()].encode()
    kind = torch.Tensor, buffer.size(), buffer.stride(), 0, torch.storage.TypedStorage, torch.uint8
    return None, (*kind, 0, path, len(buffer), 0, False, b"counter", 0, b"event", True)


def rebuild(*found: Any) -> torch.Tensor:
    _, size, _, _, _, dtype, _, path, *_ = found
    assert found[11:] == (b"counter", 0, b"event", True) and dtype is torch.uint8
    return torch.from_file(path.decode(), shared=True, size=size[0], dtype=dtype)


class _Torch:
    """torch as vLLM's packing sees it."""

    empty = staticmethod(shared_buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def install_ipc() -> None:
    """In this process, from now on: one GPU, which all processes see."""
    from torch.multiprocessing import reductions
    from vllm.distributed.weight_transfer import packed_tensor

    install()
    packed_tensor.torch = _Torch()
    packed_tensor.reduce_tensor = reduce_tensor
    reductions.rebuild_cuda_tensor = rebuild
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(uuid="GPU-0")
    torch.cuda.ipc_collect = lambda: None


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
    update_backend.transfer_obstacle = lambda transfer, *site: None if transfer == "vllm" else obstacle(transfer, *site)
