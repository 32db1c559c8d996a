"""Where the ranks meet: torch's store, on the address of the first trainer's host and nowhere else.

torchrun's own rendezvous listens on every interface and finds its host by guessing from names.  Which rank is where is
decided before, by `plan.py`.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

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


class RunRendezvous(RendezvousHandler):
    """torchrun's view of it: one rendezvous, of as many torchruns as there are trainer hosts."""

    def __init__(self, context: RoleContext, number: int, run_id: str) -> None:
        self.number = number
        self.nodes = len(context.plan.trainer_hosts)
        self.run_id = run_id
        self.server = serve(context) if number == 0 else None
        self.store = connect(context)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self.run_id, self.store)
        return RendezvousInfo(store, self.number, self.nodes, RendezvousStoreInfo(self.store.host, self.store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close before the process ends."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True


def register(context: RoleContext, number: int) -> None:
    """Make `--rdzv-backend hpcrl` known to torchrun in this process, which is that of trainer host `number`."""

    def create(params: RendezvousParameters) -> Any:
        return RunRendezvous(context, number, params.run_id)

    rendezvous_handler_registry.register(BACKEND, create)
