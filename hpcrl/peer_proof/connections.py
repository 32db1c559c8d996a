"""What the kernel says of the connections to a port of this process: who holds their other ends; and closing the port.

On one host the kernel knows the user of every socket (proc_pid_net(5)); of another host's it knows nothing.

Invariant: only what belongs to this process is changed, and of its connections only those of other users.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

from hpcrl.untrusted_files import read_system

ESTABLISHED = "01"
MAPPED = "0000000000000000FFFF0000"  #: before an IPv4 address among those of IPv6
SO_ATTACH_FILTER = 26
_RETURN = 0x06  #: the instruction of socket filters (BPF) that ends one; its operand is how many bytes are let through


def strangers(port: int) -> dict[int, int]:
    """The users other than ours that are connected to a port at which this process listens, by the port that they
    connect from.

    Both ends of a connection within this host are in the kernel's tables: theirs names the user, ours the same two
    addresses the other way round.  What only looks alike, at another address, is none.
    """
    ours: set[tuple[str, str]] = set()
    theirs: list[tuple[str, str, int]] = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in read_system(table).splitlines()[1:]:
                _, local, remote, state, _, _, _, uid, *_ = line.split()
                if state != ESTABLISHED:
                    continue
                local, remote = local.removeprefix(MAPPED), remote.removeprefix(MAPPED)
                if _port(local) == port and int(uid) in (0, os.getuid()):  # 0: not accepted yet
                    ours.add((local, remote))
                if _port(remote) == port and int(uid) != os.getuid():
                    theirs.append((local, remote, int(uid)))
    return {_port(local): uid for local, remote, uid in theirs if (remote, local) in ours}


def drop(port: int, from_ports: dict[int, int]) -> None:
    """End this process's connections at `port` that come from these ports of this host."""
    for sock in _sockets():
        with contextlib.suppress(OSError):
            if sock.getsockname()[1] == port and sock.getpeername()[1] in from_ports:
                sock.shutdown(socket.SHUT_RDWR)


def close_port(port: int) -> bool:
    """Let no further connection come to a port at which this process listens; those that it has stay.  Whether it was
    found, and the kernel has such filters.

    The socket stays, for its owner polls it: a filter drops whatever is sent to it, a request to connect included.
    """
    for sock in _sockets():
        with contextlib.suppress(OSError):
            if sock.getsockname()[1] == port and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                program = ctypes.create_string_buffer(struct.pack("=HBBI", _RETURN, 0, 0, 0))
                sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
                return True
    return False


def _sockets() -> Iterator[socket.socket]:
    """This process's TCP sockets, each through another descriptor."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
