"""What of a box's network its first process makes before it gives up its rights: a socket that listens, for the
process outside that answers there.

Invariant: where the network is not the box's own, or has more than its loopback, there is no socket but an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct

from hpcrl.sandbox.system_calls import check, libc, write_kernel

PORT = 3128
WAITING = 32  #: connections that may wait to be taken
#: what commands find in their environment
VARIABLES = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), f"http://127.0.0.1:{PORT}"),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1"),
}
_BUFFER = 64 << 10  #: bytes that the kernel holds of a connection, each way: memory that no limit of the box counts
#: of the box's network: a command can connect a socket to itself, as often as there are ports
BOUNDS = {
    "/proc/sys/net/ipv4/tcp_rmem": f"4096 {_BUFFER} {_BUFFER}",
    "/proc/sys/net/ipv4/tcp_wmem": f"4096 {_BUFFER} {_BUFFER}",
    "/proc/sys/net/ipv4/ip_local_port_range": "32768 33023",
}
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  #: SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
_REQUEST = struct.Struct("=16sH22x")  #: struct ifreq


def network_of_this() -> str:
    """The network namespace of this process, as the kernel names it."""
    return os.readlink("/proc/self/ns/net")


def open_door(outside: str) -> socket.socket:
    """A socket that listens on the loopback of this process's network namespace.

    Args:
        outside: `network_of_this` of the process that wants it, whose network the box must not share.

    Raises:
        OSError: if the box has no network namespace of its own, or a way out of it.
    """
    if network_of_this() == outside:
        raise OSError(errno.EPERM, "it has no network namespace of its own (a setting of the site's?)")
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    for _, name in socket.if_nameindex():
        flags = int(_REQUEST.unpack(_ask(door, _GET_FLAGS, name, 0))[1])
        if name != "lo" and flags & _UP:
            raise OSError(errno.EPERM, f"it has a network besides its loopback: {name}")
        if name == "lo" and not flags & _UP:
            _ask(door, _SET_FLAGS, name, flags | _UP)
    for path, value in BOUNDS.items():
        with contextlib.suppress(OSError):  # the container's /proc is read-only: the kernel's own bounds hold
            write_kernel(path, value)
    for size in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        door.setsockopt(socket.SOL_SOCKET, size, _BUFFER)  # of each connection that comes through it as well
    door.bind(("127.0.0.1", PORT))
    door.listen(WAITING)
    return door


def _ask(door: socket.socket, request: int, name: str, flags: int) -> bytes:
    words = ctypes.create_string_buffer(_REQUEST.pack(name.encode(), flags), _REQUEST.size)
    check(libc.ioctl(door.fileno(), ctypes.c_ulong(request), words), f"the network {name}")
    return words.raw
