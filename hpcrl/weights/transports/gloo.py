"""--weight-transfer gloo: broadcasts over TCP, for engines on CPUs of other hosts, or where nothing else works.

Invariant: one bucket's memory, used again and again; it is not touched before every engine has answered for the last
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcrl.engines.fleet import joined
from hpcrl.queue.auth import client_keys, server_keys
from hpcrl.rendezvous.server import StoreServer
from hpcrl.weights import gloo_group
from hpcrl.weights.bucket import fill
from hpcrl.weights.transports import Link, Stream, TransportConditions

if TYPE_CHECKING:
    import torch

BACKEND = "hpcrl_gloo"


def obstacle(site: TransportConditions) -> str | None:
    return None


class GlooTransport:
    """One broadcast a bucket, from one buffer that is used again and again."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.fleet = link.fleet
        self.limit = link.limit
        self.host = link.host
        self.bytes = 0
        self.buffer: torch.Tensor | None = None
        self.group: gloo_group.GlooGroup | None = None
        self.store: StoreServer | None = None
        self.tensors: Stream = iter(())

    def connect(self) -> None:
        rundir = self.fleet.rundir
        self.store = StoreServer(self.host, server_keys(rundir, "weights"))
        keys = client_keys(rundir, 0, "weights")
        port = self.store.port
        world = 1 + sum(self.link.workers)
        limit = self.fleet.seconds
        infos = [
            {
                "master_address": self.host,
                "master_port": port,
                "rank_offset": offset,
                "world_size": world,
                "seconds": limit,
            }
            for offset in self.link.first_ranks()
        ]
        pending = self.fleet.begin(
            "the weight transfer's init", "/init_weight_transfer_engine", [{"init_info": i} for i in infos]
        )
        self.group = joined(lambda: gloo_group.join(self.host, port, keys, 0, world, self.host, limit), pending)
        pending.results()

    def stage(self, tensors: Stream, version: int) -> None:
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
            gloo_group.broadcast(self.group, buffer[: bucket.nbytes], self.fleet.seconds, pending.check)
            pending.results()
            self.bytes += bucket.nbytes

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
        if self.store is not None:
            self.store.close()


make = GlooTransport
