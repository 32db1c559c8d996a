"""--weight-transfer shm: one copy of the model in memory that trainer and engines of one host share.

Invariant: a region is kept from update to update and only replaced by a larger one; it is filled before generation is
paused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.weights.bucket import Bucket, fill
from hpcrl.weights.shared_memory import Region
from hpcrl.weights.transports import Link, Stream, TransportConditions

if TYPE_CHECKING:
    import torch

BACKEND = "hpcrl_shm"


def obstacle(site: TransportConditions) -> str | None:
    return None if site.one_host else "needs trainer and engines on one host"


class ShmTransport:
    """Shared memory; regions are kept from update to update."""

    def __init__(self, link: Link) -> None:
        self.fleet = link.fleet
        self.limit = link.limit
        self.bytes = 0
        self.regions: list[Region] = []
        self.buckets: list[Bucket] = []

    def connect(self) -> None:
        self.fleet.post("the weight transfer's init", "/init_weight_transfer_engine", {"init_info": {}})

    def stage(self, tensors: Stream, version: int) -> None:
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


make = ShmTransport
