"""Where the ranks meet: a store that listens on the address of the first trainer's host and nowhere else.

torchrun's own rendezvous listens on every interface, finds its host by guessing from names, and unpickles what it finds
in its store.  Invariant: ours binds one address of the plan, port 0, tells the port through the run directory, and holds
only what torch.distributed puts there.
"""

from __future__ import annotations

import socket
from datetime import timedelta
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
from hpcrl.run.role import RoleContext

BACKEND = "hpcrl"
TIMEOUT = timedelta(minutes=10)


def meet(context: RoleContext, first: bool) -> tuple[TCPStore, str, int]:
    """(store, address, port): the first process opens it, the others connect to it.

    UsageError if the address cannot be bound; DeadlineError if the first process does not come up in --launch-timeout,
    counted twice, since it may still be importing torch.
    """
    address = context.plan.trainers[0].at
    if not first:
        found = wait_for(context.rundir, StorePeer, 0, 2 * context.options.launch_timeout)
        store = TCPStore(found.host, found.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
        return store, found.host, found.port
    try:
        listener = socket.create_server((address, 0), backlog=512)
    except OSError as error:
        raise UsageError(
            f"trainer rank 0 cannot listen on {address}: {error.strerror}", "does the plan name this host? see --interface"
        ) from error
    port = listener.getsockname()[1]
    # a descriptor that is handed over: the store closes it
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=TIMEOUT, master_listen_fd=listener.detach())
    publish(context.rundir, StorePeer(host=address, port=port))
    return store, address, port


class Meeting(RendezvousHandler):
    """torchrun's view of it: one rendezvous, of as many torchruns as there are trainer hosts."""

    def __init__(self, context: RoleContext, number: int, run_id: str) -> None:
        self.number, self.nodes, self.run_id = number, len(context.plan.trainer_hosts), run_id
        self.store, self.host, self.port = meet(context, first=number == 0)

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        store = PrefixStore(self.run_id, self.store)
        return RendezvousInfo(store, self.number, self.nodes, RendezvousStoreInfo(self.host, self.port))

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
        return Meeting(context, number, params.run_id)

    rendezvous_handler_registry.register(BACKEND, create)
