"""Where the ranks of one host meet: a store that listens on the plan's address and nowhere else.

torchrun's own rendezvous listens on every interface, and its c10d backend unpickles what it finds in its store, which asks
nobody for a key.  Invariant: ours binds one address, port 0, and holds only what torch.distributed puts there.
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

BACKEND = "hpcrl"


class OneHost(RendezvousHandler):
    """A rendezvous of one torchrun, whose store the ranks use too."""

    def __init__(self, host: str, run_id: str) -> None:
        self.host, self.run_id = host, run_id
        listener = socket.create_server((host, 0), backlog=512)
        self.port = listener.getsockname()[1]
        # a descriptor that is handed over: the store closes it
        self.store = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=10),
            master_listen_fd=listener.detach(),
        )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(PrefixStore(self.run_id, self.store), 0, 1, RendezvousStoreInfo(self.host, self.port))

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


def register() -> None:
    """Make `--rdzv-backend hpcrl` known to torchrun in this process; the endpoint is the address to bind."""

    def create(params: RendezvousParameters) -> Any:
        return OneHost(params.endpoint, params.run_id)

    rendezvous_handler_registry.register(BACKEND, create)
