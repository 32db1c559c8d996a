"""A process group of its own between trainer ranks and engine workers, for weights over the network without NCCL.

Trainer and engine use the same function.  The group is separate from torch's default groups on either side.

Invariant: the members find one another in a store that admits only holders of a key of the run.  Gloo itself neither
encrypts nor authenticates: see docs/security.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hpcrl.queue.auth import ClientKeys


@dataclass
class GlooGroup:
    """A joined group: the trainer's ranks come first; `close` leaves it."""

    store: Any
    group: Any

    def close(self) -> None:
        self.group = self.store = None


def join(host: str, port: int, keys: ClientKeys, rank: int, world: int, own_host: str, seconds: float) -> GlooGroup:
    """Join the group that meets in the store at host:port.

    Args:
        own_host: the address that this process's connections use.

    Returns:
        When all `world` members are there; torch raises its own error after `seconds`.
    """
    import torch.distributed as dist

    from hpcrl.rendezvous.store import KeyedStore

    limit = timedelta(seconds=seconds)
    store = KeyedStore(host, port, keys, limit)
    options = dist.ProcessGroupGloo._Options()
    # all members alike, whatever TORCH_GLOO_LAZY_INIT says in their processes: gloo crashes where one connects at once
    # and another when it must
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host, lazy_init=False)]
    options._timeout = limit
    return GlooGroup(store, dist.ProcessGroupGloo(dist.PrefixStore("hpcrl-weights", store), rank, world, options))
