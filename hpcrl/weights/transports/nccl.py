"""--weight-transfer nccl: vLLM's own backend, packed broadcasts between GPUs.

vLLM must be installed beside the trainer, in the engines' version.  0.26 and 0.32 differ in when both sides agree on
packing.  Invariant: at most one bucket of tensors is held at a time, in GPU memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpcrl.weights import gloo_group
from hpcrl.weights.bucket import Packer, dtype_name
from hpcrl.weights.engine_fleet import joined
from hpcrl.weights.transports import Link, Site, Stream

if TYPE_CHECKING:
    import torch


BACKEND = "nccl"


def obstacle(site: Site) -> str | None:
    return "needs CUDA, but vLLM's CPU build is installed" if site.cpu else None


class NcclTransport:
    """vLLM's packed broadcast, a bucket at a time."""

    def __init__(self, link: Link) -> None:
        self.link, self.fleet, self.limit, self.host, self.bytes = link, link.fleet, link.limit, link.host, 0
        self.group: Any = None
        self.tensors: Stream = iter(())

    def connect(self) -> None:
        from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, trainer_init

        meeting = gloo_group.listen(self.host)
        port, world = meeting.getsockname()[1], 1 + sum(self.link.workers)
        meeting.close()  # vLLM binds it itself
        # vLLM 0.32 agrees on packing here, 0.26 with every update
        fields = {field.name for field in dataclasses.fields(NCCLWeightTransferInitInfo)}
        self.packing = {"packed": True, "packed_buffer_size_bytes": self.limit, "packed_num_buffers": 2}
        self.packed_at_init = "packed" in fields
        common = {"master_address": self.host, "master_port": port, "world_size": world}
        own = self.packing if self.packed_at_init else {}
        bodies = [{"init_info": {**common, "rank_offset": offset, **own}} for offset in self.link.first_ranks()]
        pending = self.fleet.begin("the weight transfer's init", "/init_weight_transfer_engine", bodies)
        self.group = joined(lambda: trainer_init(common), pending)
        pending.results()

    def stage(self, tensors: Stream) -> None:
        self.tensors = tensors

    def send(self) -> None:
        import torch
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        self.bytes = 0
        for group in grouped(self.tensors, self.limit):
            info: dict[str, Any] = {
                "names": [name for name, _ in group],
                "dtype_names": [dtype_name(tensor) for _, tensor in group],
                "shapes": [list(tensor.shape) for _, tensor in group],
            }
            if not self.packed_at_init:
                info |= self.packing
            pending = self.fleet.begin("the weight update", "/update_weights", [{"update_info": info}] * len(self.fleet.engines))
            pending.check()
            pairs = iter([(name, tensor.cuda()) for name, tensor in group])
            packed_nccl_broadcast_producer(
                iterator=pairs,
                group=self.group,
                src=0,
                post_iter_func=lambda pair: pair[1],
                buffer_size_bytes=self.limit,
                num_buffers=2,
            )
            torch.cuda.synchronize()
            pending.results()
            self.bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in group)

    def close(self) -> None:
        self.group = None


make = NcclTransport


def grouped(tensors: Stream, limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Tensors in lists of at most `limit` bytes (or one larger tensor), without copying them."""
    packer, group = Packer(limit), []
    for name, tensor in tensors:
        if not packer.fits(dtype_name(tensor), tensor.shape):
            yield group
            packer, group = Packer(limit), []
        packer.add(name, dtype_name(tensor), tensor.shape)
        group.append((name, tensor))
    if group:
        yield group
