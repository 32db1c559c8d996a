"""A process group of its own between trainer ranks and engine workers, for weights over the network without NCCL.

Trainer and engine use the same function.  The group is separate from torch's default groups on either side.

Invariants: the members find one another in a store that admits only holders of a key of the run, and have proved to one
another that they hold it when the group is joined.  Gloo encrypts nothing: see docs/security.md.
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

    Raises:
        PeerError: if a process without the run's key is in a member's place.
    """
    import torch.distributed as dist

    from hpcrl.peer_proof.gloo_groups import ProvedGloo
    from hpcrl.rendezvous.store import KeyedStore

    limit = timedelta(seconds=seconds)
    store = KeyedStore(host, port, keys, limit)
    options = dist.ProcessGroupGloo._Options()
    # all members alike, whatever TORCH_GLOO_LAZY_INIT says in their processes: gloo crashes where one connects at once
    # and another when it must
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host, lazy_init=False)]
    options._timeout = limit
    meeting = dist.PrefixStore("hpcrl-weights", store)
    name = f"the group of {world} that moves weights"
    return GlooGroup(store, ProvedGloo(meeting, rank, world, options, key=store.pair_key, name=name))
