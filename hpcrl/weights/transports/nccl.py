"""--weight-transfer nccl: vLLM's own backend, packed broadcasts between GPUs.

vLLM must be installed with the trainer, in the engines' version.

Invariants: at most one bucket of tensors is held at a time, in GPU memory; nothing is sent before the kernels that
compute it have ended; every wait for the GPU, which waits for the engines, looks at what the engines say and has their
deadline.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hpcrl.engines.fleet import PendingCalls, joined
from hpcrl.weights.bucket import Packer, dtype_name
from hpcrl.weights.transports import Link, Stream, TransportConditions

if TYPE_CHECKING:
    import torch


BUFFERS = 2  #: buckets under way at once in vLLM's broadcast
BACKEND = "nccl"
PIECES = "hpcrl_nccl"  #: for --weight-update resharded: our own receiver, which takes pieces alone


def obstacle(site: TransportConditions) -> str | None:
    return "needs CUDA, but vLLM's CPU build is installed" if site.cpu else None


class NcclTransport:
    """vLLM's packed broadcast, a bucket at a time."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.fleet = link.fleet
        self.limit = link.limit
        self.host = link.host
        self.bytes = 0
        self.group: Any = None
        self.tensors: Stream = iter(())

    def connect(self) -> None:
        import torch
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        # Told over HTTP, under each engine's key: the store in which vLLM's members would meet takes what anybody puts
        # there for a pickle of theirs.
        name = unique_id()
        world = 1 + sum(self.link.workers)
        packing = {"packed": True, "packed_buffer_size_bytes": self.limit, "packed_num_buffers": BUFFERS}
        common = {"nccl_unique_id_b64": base64.b64encode(name).decode(), "world_size": world}
        bodies = [{"init_info": {**common, "rank_offset": offset, **packing}} for offset in self.link.first_ranks()]
        pending = self.fleet.begin("the weight transfer's init", "/init_weight_transfer_engine", bodies)
        device = torch.cuda.current_device()
        self.group = joined(on_this_device(lambda: uid_init_process_group(name, 0, world, device)), pending)
        pending.results()

    def stage(self, tensors: Stream, version: int) -> None:
        self.tensors = tensors

    def send(self) -> None:
        self.bytes = 0
        for group in grouped(self.tensors, self.limit):
            info: dict[str, Any] = {
                "names": [name for name, _ in group],
                "dtype_names": [dtype_name(tensor) for _, tensor in group],
                "shapes": [list(tensor.shape) for _, tensor in group],
            }
            pending = self.fleet.begin(
                "the weight update", "/update_weights", [{"update_info": info}] * len(self.fleet.engines)
            )
            pairs = [(name, tensor.cuda()) for name, tensor in group]
            wait_for_gpu(pending)
            joined(on_this_device(lambda pairs=pairs: self._broadcast(pairs)), pending)
            pending.results()
            self.bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in group)

    def _broadcast(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        """Returns once the engines have it all: vLLM waits for its own streams, without a deadline."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter(pairs),
            group=self.group,
            src=0,
            post_iter_func=lambda pair: pair[1],
            buffer_size_bytes=self.limit,
            num_buffers=BUFFERS,
        )

    def close(self) -> None:
        self.group = None


make = NcclTransport


def unique_id() -> bytes:
    """A new name for a group, 128 bytes of NCCL's, which holds where its members meet and the secret that they show
    there."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils.nccl import unpinned_nccl_env

    with unpinned_nccl_env():
        return bytes(memoryview(NCCLLibrary().ncclGetUniqueId().internal))


def wait_for_gpu(pending: PendingCalls) -> None:
    """Wait until all that this thread's stream was given is done.  Raises what `pending.check` raises meanwhile.

    vLLM copies the tensors on its own streams, which know nothing of the one that gathers and casts them.
    """
    import torch

    done = torch.cuda.Event()
    done.record()
    while not done.query():
        pending.check()
        time.sleep(0.0005)
    pending.check()


def on_this_device(work: Callable[[], Any]) -> Callable[[], Any]:
    """`work` for another thread, on this thread's GPU: a new thread begins on GPU 0."""
    import torch

    device = torch.cuda.current_device()

    def there() -> Any:
        torch.cuda.set_device(device)
        return work()

    return there


def grouped(tensors: Stream, limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Tensors in lists of at most `limit` bytes (or one larger tensor), without copying them."""
    packer = Packer(limit)
    group = []
    for name, tensor in tensors:
        if not packer.fits(dtype_name(tensor), tensor.shape):
            yield group
            packer = Packer(limit)
            group = []
        packer.add(name, dtype_name(tensor), tensor.shape)
        group.append((name, tensor))
    if group:
        yield group
