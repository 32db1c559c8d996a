"""A process group of its own between trainer rank 0 and the engine workers, for weights over the network without NCCL.

Trainer and engine use the same functions.  The group is apart from torch's default groups of either side.

A broadcast that is given up keeps its group, and the end of the process, waiting until gloo's own limit or until the
peers are gone (gloo has no abort); who gives one up must let the run end.

Invariants: the meeting point listens on one named address; every wait has a deadline.  Gloo itself neither encrypts nor
asks who is there: it is for a network that only the run's allocation can reach, as NCCL is.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpcrl.errors import DeadlineError

if TYPE_CHECKING:
    import torch


@dataclass
class GlooGroup:
    """A joined group: rank 0 is the trainer; `close` leaves it."""

    store: Any
    group: Any

    def close(self) -> None:
        self.group = self.store = None


def listen(host: str) -> socket.socket:
    """A socket on a free port of `host`, for the meeting point."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind((host, 0))
    sock.listen()
    return sock


def join(
    host: str, port: int, rank: int, world: int, own_host: str, seconds: float, meeting: socket.socket | None = None
) -> GlooGroup:
    """Join the group that meets at host:port; the trainer (rank 0) brings the listening socket, which becomes the store's.

    own_host: the address that this process's connections use.  Returns when all `world` members are there; torch raises
    its own error after `seconds`.
    """
    import torch.distributed as dist

    limit = timedelta(seconds=seconds)
    extra = {"master_listen_fd": meeting.detach()} if meeting is not None else {}
    store = dist.TCPStore(host, port, world, meeting is not None, limit, wait_for_workers=False, **extra)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
    options._timeout = limit
    return GlooGroup(store, dist.ProcessGroupGloo(dist.PrefixStore("hpcrl-weights", store), rank, world, options))


def broadcast(group: GlooGroup, tensor: torch.Tensor, seconds: float, watch: Callable[[], None] = lambda: None) -> None:
    """Send the trainer's tensor to all, or receive it.  watch() is called now and then and may raise.

    DeadlineError after `seconds`.
    """
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    work = group.group.broadcast([tensor], options)
    end, pause = time.monotonic() + seconds, 1e-5
    while not work.is_completed():
        watch()
        if time.monotonic() > end:
            raise DeadlineError(f"a broadcast of weights did not end within {seconds:.0f} s")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.01)
    work.wait()
