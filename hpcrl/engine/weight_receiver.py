"""The receiving end of weight updates, inside vLLM's workers (loaded there through --worker-extension-cls).

Two backends of vLLM's own weight-transfer phases (init, start, update, finish), beside its NCCL one:
    hpcrl_shm    one update names all buckets of a model, which lie in memory shared with the trainer
    hpcrl_gloo   one update a bucket, broadcast by trainer rank 0
and a few calls for POST /collective_rpc: what the engine holds, whether it holds what was sent, giving up an update.

Invariants: those of weight_loading.py; importing this does nothing; nothing from the wire is unpickled or imported by name; no worker outlives its server.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Self

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from hpcrl.engine.vllm_layers import Holdings, shown
from hpcrl.engine.weight_loading import Receiver, UpdateRejected, stock
from hpcrl.run.process import PARENT, die_with_parent
from hpcrl.weights import gloo
from hpcrl.weights.bucket import Bucket, views
from hpcrl.weights.digest import digest
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

    init_info_cls, update_info_cls = ShmInit, ShmUpdate

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
                f"cannot open the trainer's memory ({error}): with containers or hosts between them use --weight-transfer gloo"
            ) from error
        return [self.mapped[key] for key in keys]

    def shutdown(self) -> None:
        super().shutdown()
        self.mapped = {}


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
    """Takes part in the trainer's broadcasts.  Bytes are received before anything can be refused: others wait for us."""

    init_info_cls, update_info_cls = GlooInit, GlooUpdate
    group: gloo.GlooGroup | None = None
    seconds = 0.0

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        config = self.parallel_config
        rank = init_info.rank_offset + getattr(config, "data_parallel_index", 0) * config.world_size + config.rank
        own, self.seconds = os.environ.get("VLLM_HOST_IP") or init_info.master_address, init_info.seconds
        self.group = gloo.join(
            init_info.master_address, init_info.master_port, rank, init_info.world_size, own, init_info.seconds
        )

    def receive_weights(self, update_info: GlooUpdate) -> None:
        if self.group is None:
            raise UpdateRejected("the group was not joined")
        bucket = Bucket.from_wire(update_info.bucket)
        buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)  # a new one each time: vLLM keeps views until a layer is complete
        gloo.broadcast(self.group, buffer, self.seconds)
        account = self._open_account()
        account.admit(bucket.slots)
        if update_info.last:
            account.close()
        self.load(views(buffer, bucket), update_info.last)

    def shutdown(self) -> None:
        super().shutdown()
        if self.group is not None:
            self.group.close()


BACKENDS: dict[str, type[Receiver]] = {"hpcrl_shm": ShmReceiver, "hpcrl_gloo": GlooReceiver}


def register_backends() -> None:
    """Make our backends known to vLLM in this process."""
    for name, receiver in BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, receiver)


class WorkerExtension:
    """Methods of each worker for POST /collective_rpc; only text and plain values cross.

    vLLM makes it a base of its worker's class, so that `__new__` runs once in every worker's process: when the worker is
    made, before it has a model or a weight-transfer engine.  (Its own `__init__` would not be called.)
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        register_backends()
        os.environ.pop(PARENT, None)  # names the server, but vLLM's engine core may stand between it and this worker
        die_with_parent()  # a worker never outlives who started it, however that one ends
        return super().__new__(cls)

    model_runner: Any
    rank: int
    weight_transfer_engine: Any
    _weight_update_active: bool

    def hpcrl_manifest(self) -> dict[str, Any]:
        """Which tensors an update must bring, and which parts of them this worker holds."""
        held = self._hpcrl_held()
        return {
            "backend": self.weight_transfer_engine.config.backend,
            "rank": self.rank,
            "tensors": {name: piece.to_wire() for name, piece in held.pieces.items()},
            "opaque": list(held.opaque),
            "unseen": {name: {"shape": entry.shape, "dtype": entry.dtype} for name, entry in held.unseen.items()},
        }

    def hpcrl_check(self, expected: str) -> dict[str, Any]:
        """Compare what the model multiplies with to {rank of the worker: {name: digest of its part}}, given as JSON.

        Returns how many were compared, which differ, and which were expected and cannot be shown.
        """
        wanted: dict[str, str] = json.loads(expected)[str(self.rank)]
        different, compared = [], 0
        for name, tensor in shown(self._hpcrl_held()):
            compared += 1
            if wanted.pop(name, None) != digest(tensor):
                different.append(name)
        return {"rank": self.rank, "compared": compared, "different": different, "unknown": sorted(wanted)}

    def hpcrl_abandon(self) -> dict[str, Any]:
        """Give up an update that was started and not finished; tells whether the model is mixed between two versions.

        Torn is also one that has all the new tensors under the old version: its samples would lie about where they come
        from.
        """
        engine = self.weight_transfer_engine
        if not isinstance(engine, Receiver):
            mixed = self._weight_update_active  # vLLM's own backend does not know how far it came
            if mixed:
                finalize_layerwise_reload(engine.model, engine.model_config)
        else:
            engine.put_back()
            mixed = engine.mixed or engine.unfinished
        self._weight_update_active = False
        return {"rank": self.rank, "mixed": mixed}

    def _hpcrl_held(self) -> Holdings:
        engine = self.weight_transfer_engine
        if isinstance(engine, Receiver):
            return engine.take_stock()
        return stock(engine)
