"""A process group of its own between trainer ranks and engine workers, for weights over the network without NCCL.

Trainer and engine use the same function.  The group is separate from torch's default groups on either side.

Invariant: its sockets are bound to the member's own address.  Gloo encrypts nothing: see docs/security.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hpcrl.transport.torch_store import connect_store


@dataclass
class GlooGroup:
    """A joined group: the trainer's ranks come first; `close` leaves it.

    Attributes:
        watched: the store over another connection, for a thread: a call of torch's store waits for those before it.
    """

    store: Any
    group: Any
    watched: Any = None

    def close(self) -> None:
        self.group = self.store = self.watched = None


def join(host: str, port: int, rank: int, world: int, own_host: str, seconds: float) -> GlooGroup:
    """Join the group that meets in the store at host:port.

    Args:
        own_host: the address that this process's connections use.

    Returns:
        When all `world` members are there; torch raises its own error after `seconds`.
    """
    import torch.distributed as dist

    limit = timedelta(seconds=seconds)
    store = connect_store(host, port, seconds)
    options = dist.ProcessGroupGloo._Options()
    # all members alike, whatever TORCH_GLOO_LAZY_INIT says in their processes: gloo crashes where one connects at once
    # and another when it must
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host, lazy_init=False)]
    options._timeout = limit
    meeting = dist.PrefixStore("hpcrl-weights", store)
    return GlooGroup(store, dist.ProcessGroupGloo(meeting, rank, world, options), store.clone())
