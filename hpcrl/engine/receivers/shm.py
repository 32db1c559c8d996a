"""The receiving end of --weight-transfer shm: one update names all buckets of a model, which lie in memory shared with
the trainer.

Invariant: everything is checked before anything is loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from hpcrl.engine.weight_loading import Receiver, UpdateRejected
from hpcrl.weights.bucket import Bucket, views
from hpcrl.weights.shared_memory import open_region


@dataclass
class ShmInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class ShmUpdate(WeightTransferUpdateInfo):
    """All buckets of a model (`Bucket.to_wire`) and the region that each lies in (`Region.to_wire`)."""

    buckets: list[dict[str, Any]]
    regions: list[dict[str, int]]


class ShmReceiver(Receiver):
    """Reads the trainer's shared memory.  Everything is checked before anything is loaded."""

    init_info_cls = ShmInit
    update_info_cls = ShmUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mapped: dict[str, torch.Tensor] = {}  # kept: a new mapping would fault in every page again

    def init_transfer_engine(self, init_info: ShmInit) -> None:
        pass

    def receive_weights(self, update_info: ShmUpdate) -> None:
        account = self._open_account()
        buckets = [Bucket.from_wire(wire) for wire in update_info.buckets]
        for bucket in buckets:
            account.admit(bucket.slots)
        account.close()
        buffers = self._map(update_info.regions)
        for bucket, buffer in zip(buckets, buffers, strict=True):
            if bucket.nbytes > buffer.numel():
                raise UpdateRejected(f"a bucket of {bucket.nbytes} bytes in a region of {buffer.numel()}")
        self.load((pair for b, buffer in zip(buckets, buffers, strict=True) for pair in views(buffer, b)), last=True)

    def _map(self, regions: list[dict[str, int]]) -> list[torch.Tensor]:
        keys = [json.dumps(region, sort_keys=True) for region in regions]
        try:
            self.mapped = {
                key: self.mapped[key] if key in self.mapped else open_region(region)
                for key, region in zip(keys, regions, strict=True)
            }
        except OSError as error:
            raise UpdateRejected(
                f"cannot open the trainer's memory ({error}): with containers or hosts between them use "
                "--weight-transfer gloo"
            ) from error
        return [self.mapped[key] for key in keys]

    def shutdown(self) -> None:
        super().shutdown()
        self.mapped = {}


RECEIVER = ShmReceiver
