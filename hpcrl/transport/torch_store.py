"""torch's TCPStore, in which the members of a process group meet, on one address.

    server = open_store("10.0.0.1")
    store = connect_store(server.host, server.port, seconds)

torch listens on every interface unless it is given a socket that listens already.

Invariant: a server listens on the address that it was given and on no other, for as long as it is referred to.
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from hpcrl.errors import UsageError

BACKLOG = 1024  #: connections that wait to be accepted


def open_store(address: str) -> TCPStore:
    """Serve a store on a port that the system chooses.

    Raises:
        UsageError: if that is not possible.
    """
    hint = "is this the host that the plan names? see --interface"
    try:
        family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(where[0]).is_unspecified:
            raise UsageError(f"{address} means every interface", "name one host or address in the hostfile")
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.bind(where)
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {error.strerror or error}", hint) from error
    port = sock.getsockname()[1]
    return TCPStore(str(where[0]), port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())


def connect_store(host: str, port: int, seconds: float) -> TCPStore:
    """Connect to a store.

    Args:
        seconds: until a call that waits is given up.

    Raises:
        DistError: if it does not answer.
    """
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
