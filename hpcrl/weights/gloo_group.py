"""A process group of its own between trainer ranks and engine workers, for weights over the network without NCCL.

Trainer and engine use the same functions.  The group is separate from torch's default groups on either side.

A broadcast that is given up keeps its group, and the end of the process, waiting until gloo's own limit or until the
peers are gone (gloo has no abort); a caller that gives one up must let the run end.

Invariants: the members find one another in a store that admits only holders of a key of the run; every wait has a
deadline. Gloo itself neither encrypts nor authenticates: see docs/security.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpcrl.errors import DeadlineError
from hpcrl.queue.auth import ClientKeys
from hpcrl.toolbox.deadline import Deadline
from hpcrl.toolbox.retry import Pauses

if TYPE_CHECKING:
    import torch


@dataclass
class GlooGroup:
    """A joined group: rank 0 is the trainer; `close` leaves it."""

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
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
    options._timeout = limit
    return GlooGroup(store, dist.ProcessGroupGloo(dist.PrefixStore("hpcrl-weights", store), rank, world, options))


def broadcast(group: GlooGroup, tensor: torch.Tensor, seconds: float, watch: Callable[[], None] = lambda: None) -> None:
    """Send the trainer's tensor to all, or receive it. watch() is called now and then and may raise.

    Raises:
        DeadlineError: after `seconds`.
    """
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    work = group.group.broadcast([tensor], options)
    end = Deadline(seconds)
    pauses = iter(Pauses(1e-5, 0.01, growth=1.5))
    while not work.is_completed():
        watch()
        if end.over:
            raise DeadlineError(f"a broadcast of weights did not end within {seconds:.0f} s")
        time.sleep(next(pauses))
    work.wait()
