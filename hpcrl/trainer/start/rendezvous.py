"""Where the ranks meet: torch's store, on the address of the first trainer's host and nowhere else.

torchrun's own rendezvous listens on every interface and finds its host by guessing from names.  Which rank is where is
decided before, by `plan.py`.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from hpcrl.errors import UsageError
from hpcrl.run.peers import StorePeer, publish, wait_for
from hpcrl.run.role import RoleContext, launch_timeout
from hpcrl.transport.torch_store import connect_store, open_store

BACKEND = "hpcrl"
TIMEOUT = 600.0  #: seconds


def serve(context: RoleContext) -> TCPStore:
    """Open the store, in the first process of the trainer, and publish its address.

    Raises:
        UsageError: if the address cannot be bound.
    """
    try:
        server = open_store(context.plan.trainers[0].at)
    except UsageError as error:
        raise UsageError(f"trainer rank 0 {error.what}", error.hint) from error
    publish(context.rundir, StorePeer(host=server.host, port=server.port))
    return server


def connect(context: RoleContext) -> TCPStore:
    """Connect to the store.

    Raises:
        DeadlineError: if the first process does not come up in `launch_timeout`, counted twice, since it may still be
            importing torch.
    """
    found = wait_for(context.rundir, StorePeer, 0, 2 * launch_timeout())
    return connect_store(found.host, found.port, TIMEOUT)


class RunRendezvous(StaticTCPRendezvous):
    """torchrun's own, of as many torchruns as there are trainer hosts, in the run's store."""

    def __init__(self, context: RoleContext, number: int, run_id: str) -> None:
        self.server = serve(context) if number == 0 else None
        store = connect(context)
        super().__init__(store.host, store.port, number, len(context.plan.trainer_hosts), run_id, int(TIMEOUT))
        self._store = store  # else it makes one, which listens on every interface

    def get_backend(self) -> str:
        return BACKEND


def register(context: RoleContext, number: int) -> None:
    """Make `--rdzv-backend hpcrl` known to torchrun in this process, which is that of trainer host `number`."""

    def create(params: RendezvousParameters) -> Any:
        return RunRendezvous(context, number, params.run_id)

    rendezvous_handler_registry.register(BACKEND, create)
