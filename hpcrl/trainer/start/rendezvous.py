"""Where the ranks meet: a store that listens on the address of the first trainer's host and nowhere else.

torchrun's own rendezvous listens on every interface, finds its host by guessing from names, and admits anybody.  Which
rank is where is decided before, by `plan.py`.

Invariant: ours binds one address of the plan, port 0, publishes the port in the run directory, admits peers that have
the ranks' key of this attempt, and holds only what torch.distributed puts there, and what each host's first rank says
of its packages (`trainer/megatron/running_parts.py`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from hpcrl.errors import UsageError
from hpcrl.queue.auth import client_keys, server_keys
from hpcrl.rendezvous.server import StoreServer
from hpcrl.rendezvous.store import KeyedStore
from hpcrl.run.peers import StorePeer, publish, wait_for
from hpcrl.run.role import RoleContext

BACKEND = "hpcrl"
TIMEOUT = timedelta(minutes=10)


def open_store(context: RoleContext) -> StoreServer:
    """Open the store, in the first process of the trainer.

    Raises:
        UsageError: if the address cannot be bound.
    """
    try:
        server = StoreServer(context.plan.trainers[0].at, server_keys(context.rundir, "ranks"))
    except UsageError as error:
        raise UsageError(f"trainer rank 0 {error.what}", error.hint) from error
    publish(context.rundir, StorePeer(host=server.address, port=server.port))
    return server


def connect(context: RoleContext) -> KeyedStore:
    """Connect to the store.

    Raises:
        DeadlineError: if the first process does not come up in --launch-timeout, counted twice, since it may still be
            importing torch.
    """
    found = wait_for(context.rundir, StorePeer, 0, 2 * context.options.launch_timeout)
    keys = client_keys(context.rundir, 0, "ranks")
    return KeyedStore(found.host, found.port, keys, TIMEOUT, context.rundir.check, context.plan.rank_look())


class RunRendezvous(RendezvousHandler):
    """torchrun's view of it: one rendezvous, of as many torchruns as there are trainer hosts."""

    def __init__(self, context: RoleContext, number: int, run_id: str) -> None:
        self.number = number
        self.nodes = len(context.plan.trainer_hosts)
        self.run_id = run_id
        self.server = open_store(context) if number == 0 else None
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
