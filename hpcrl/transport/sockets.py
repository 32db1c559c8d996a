"""What the sockets of both sides have in common: limits, heartbeats, addresses, and memory that is used again.

Invariants: a client reads no frame larger than MAX_PIECE, and the server, to which anybody may connect, none larger
than `messages.LIMIT`, neither before it knows who is there nor after; a connection whose other end is silent for
HEARTBEAT_TIMEOUT is given up by libzmq, on both sides; the server listens on one interface, the one that the plan
names; no more than KEPT bytes stay with the process that it does not use, and larger blocks than BLOCK go back at once.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket

import zmq

from hpcrl.errors import UsageError
from hpcrl.plan import Plan
from hpcrl.transport.messages import LIMIT, MAX_PIECE

#: milliseconds between heartbeats, and of silence until a connection counts as dead.  They are libzmq's own, answered
#: by its threads whatever Python does.
HEARTBEAT, HEARTBEAT_TIMEOUT = 5_000, 30_000
#: milliseconds that a peer has to say who it is; it may try again (libzmq's own default is 30 s)
HANDSHAKE = 10_000
#: messages that libzmq queues for one peer; a client has at most two answers under way
HIGH_WATER = 1_000
#: milliseconds that a closed socket may still take to send; libzmq's own default is for ever, which would hang an exit
LINGER = 1_000
#: bytes at the heap's end that are not given back; bytes of a block that is not part of the heap
KEPT, BLOCK = 2**27, 2**25
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def set_limits(sock: zmq.Socket, *, server: bool = False) -> None:
    """Limits and heartbeats of a socket of the queue."""
    sock.maxmsgsize = LIMIT if server else MAX_PIECE
    sock.handshake_ivl = HANDSHAKE
    sock.sndhwm = sock.rcvhwm = HIGH_WATER
    sock.heartbeat_ivl = HEARTBEAT
    sock.heartbeat_timeout = HEARTBEAT_TIMEOUT
    sock.linger = LINGER
    sock.backlog = 512
    sock.ipv6 = True


def endpoint(host: str, port: int) -> str:
    """The ZeroMQ name of an address; port 0 lets the system choose."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bind_address(plan: Plan) -> str:
    """The address of the rollout's host, to listen on and to be reached at.

    Raises:
        UsageError: if it is not a single interface.
    """
    host = plan.rollout.at
    try:
        address = ipaddress.ip_address(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:
        raise UsageError(f"rollout: host {host} of the plan has no address: {error}", "check the hostfile") from error
    if address.is_unspecified:
        raise UsageError(f"rollout: {host} means every interface", "name one host or address in the hostfile")
    if address.is_loopback and len(plan.hosts) > 1:
        raise UsageError(
            f"rollout: {host} is {address} here, which other hosts cannot reach",
            "name the address of its network in the hostfile",
        )
    return str(address)


def keep_freed_memory() -> None:
    """Have this process keep what it frees, where its C library is glibc.

    A batch is some ten megabytes in blocks of half a megabyte and more: sent, encrypted, received, decrypted, joined.
    glibc gives such blocks back to the kernel as soon as they are free, and the kernel has to clear every page of the
    next ones: a third of all that the queue costs (bench/queue.py).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, KEPT)
        mallopt(_MMAP_THRESHOLD, BLOCK)
