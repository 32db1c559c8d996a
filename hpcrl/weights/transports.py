"""The ways for a model's tensors to reach the engines; which one, the engines say.

    hpcrl_shm    copied once into memory that all engines of the host map; done before generation is paused.
                 Holds one copy of the whole model in host memory.
    hpcrl_gloo   broadcast over TCP, a bucket at a time; holds one bucket.
    nccl         vLLM's own backend, see nccl.py.

Invariant: a bucket's memory is not touched again before every engine has what it needs of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from hpcrl.weights import gloo
from hpcrl.weights.bucket import Bucket, fill
from hpcrl.weights.engine_fleet import Fleet, joined
from hpcrl.weights.shared_memory import Region

if TYPE_CHECKING:
    import torch

Stream = Iterator[tuple[str, "torch.Tensor"]]


class Transport(Protocol):
    """How tensors travel; `bytes` counts those of the last update."""

    bytes: int

    def connect(self) -> None:
        """Once, before the first update."""

    def stage(self, tensors: Stream) -> None:
        """What can be done while the engines still generate."""

    def send(self) -> None:
        """The rest, while they are paused: the update phase of all engines."""

    def close(self) -> None: ...


class ShmTransport:
    """Shared memory; regions are kept from update to update."""

    def __init__(self, fleet: Fleet, limit: int) -> None:
        self.fleet, self.limit, self.bytes = fleet, limit, 0
        self.regions: list[Region] = []
        self.buckets: list[Bucket] = []

    def connect(self) -> None:
        self.fleet.post("the weight transfer's init", "/init_weight_transfer_engine", {"init_info": {}})

    def stage(self, tensors: Stream) -> None:
        self.buckets = [bucket for bucket, _, _ in fill(tensors, self.limit, self._room)]
        self.bytes = sum(bucket.nbytes for bucket in self.buckets)

    def _room(self, number: int, size: int) -> torch.Tensor:
        if number < len(self.regions) and self.regions[number].size < size:
            self.regions[number].close()
            self.regions[number] = Region(size)
        elif number == len(self.regions):
            self.regions.append(Region(size))
        return self.regions[number].buffer

    def send(self) -> None:
        regions = [region.to_wire() for region in self.regions[: len(self.buckets)]]
        info = {"buckets": [bucket.to_wire() for bucket in self.buckets], "regions": regions}
        self.fleet.post("the weight update", "/update_weights", {"update_info": info})

    def close(self) -> None:
        for region in self.regions:
            region.close()
        self.regions = []


class GlooTransport:
    """One broadcast a bucket, from one buffer that is used again and again."""

    def __init__(self, fleet: Fleet, limit: int, host: str, workers: list[int]) -> None:
        self.fleet, self.limit, self.host, self.workers, self.bytes = fleet, limit, host, workers, 0
        self.buffer: torch.Tensor | None = None
        self.group: gloo.GlooGroup | None = None
        self.tensors: Stream = iter(())

    def connect(self) -> None:
        meeting = gloo.listen(self.host)
        port, world, limit = meeting.getsockname()[1], 1 + sum(self.workers), self.fleet.seconds
        infos = [
            {"master_address": self.host, "master_port": port, "rank_offset": offset, "world_size": world, "seconds": limit}
            for offset in first_ranks(self.workers)
        ]
        pending = self.fleet.begin(
            "the weight transfer's init", "/init_weight_transfer_engine", [{"init_info": i} for i in infos]
        )
        self.group = joined(lambda: gloo.join(self.host, port, 0, world, self.host, limit, meeting), pending)
        pending.results()

    def stage(self, tensors: Stream) -> None:
        self.tensors = tensors

    def _room(self, _: int, size: int) -> torch.Tensor:
        import torch

        if self.buffer is None or self.buffer.numel() < size:
            self.buffer = torch.empty(size, dtype=torch.uint8)
        return self.buffer

    def send(self) -> None:
        assert self.group is not None, "connect() comes first"
        self.bytes = 0
        for bucket, buffer, last in fill(self.tensors, self.limit, self._room):
            body = {"update_info": {"bucket": bucket.to_wire(), "last": last}}
            pending = self.fleet.begin("the weight update", "/update_weights", [body] * len(self.fleet.engines))
            gloo.broadcast(self.group, buffer[: bucket.nbytes], self.fleet.seconds, pending.check)
            pending.results()
            self.bytes += bucket.nbytes

    def close(self) -> None:
        if self.group is not None:
            self.group.close()


def first_ranks(workers: list[int]) -> list[int]:
    """The rank of each engine's first worker, behind the trainer's 0."""
    return [1 + sum(workers[:i]) for i in range(len(workers))]
