"""The socket that a server gets from its supervisor: bound before the server starts, so that its port is known and
nobody else's."""

from __future__ import annotations

import socket


def bound_socket(host: str, port: int) -> socket.socket:
    """Bound, not listening yet; port 0: any free one.  OSError where that cannot be."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
    except OSError:
        sock.close()
        raise
    return sock
