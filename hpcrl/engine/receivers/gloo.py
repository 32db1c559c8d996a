"""The receiving end of --weight-transfer gloo: one update a bucket, broadcast by trainer rank 0.

Invariant: bytes are received before anything can be refused, since others wait for us.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from hpcrl.engine.key_guard import KEY_FILE
from hpcrl.engine.weight_loading import Receiver, UpdateRejected
from hpcrl.queue.auth import keys_in
from hpcrl.weights import gloo_group
from hpcrl.weights.bucket import Bucket, views


@dataclass
class GlooInit(WeightTransferInitInfo):
    """Where the group meets; this engine's workers are ranks rank_offset, rank_offset + 1, ... of world_size."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    seconds: float


@dataclass
class GlooUpdate(WeightTransferUpdateInfo):
    """One bucket (`Bucket.to_wire`), which follows as one broadcast of its bytes."""

    bucket: dict[str, Any]
    last: bool


class GlooReceiver(Receiver):
    """Takes part in the trainer's broadcasts.  Bytes are received before anything can be refused: other members wait
    for this one."""

    init_info_cls = GlooInit
    update_info_cls = GlooUpdate
    group: gloo_group.GlooGroup | None = None
    seconds = 0.0

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        config = self.parallel_config
        rank = init_info.rank_offset + getattr(config, "data_parallel_index", 0) * config.world_size + config.rank
        own = os.environ.get("VLLM_HOST_IP") or init_info.master_address
        self.seconds = init_info.seconds
        keys = keys_in(Path(os.environ[KEY_FILE]).parent, 0, "weights")
        self.group = gloo_group.join(
            init_info.master_address, init_info.master_port, keys, rank, init_info.world_size, own, init_info.seconds
        )

    def receive_weights(self, update_info: GlooUpdate) -> None:
        if self.group is None:
            raise UpdateRejected("the group was not joined")
        bucket = Bucket.from_wire(update_info.bucket)
        buffer = torch.empty(
            bucket.nbytes, dtype=torch.uint8
        )  # a new one each time: vLLM keeps views until a layer is complete
        gloo_group.broadcast(self.group, buffer, self.seconds)
        account = self._open_account()
        account.admit(bucket.slots)
        if update_info.last:
            account.close()
        self.load(views(buffer, bucket), update_info.last)

    def shutdown(self) -> None:
        super().shutdown()
        if self.group is not None:
            self.group.close()


RECEIVER = GlooReceiver
