"""The connections to a server on which no peer has proved its key yet: few, so that descriptors remain for the others.

    ACCEPTED, DISCONNECTED   libzmq tells of each connection, by its descriptor
    TCP_INFO                 the kernel tells how many bytes the peer has acknowledged

libzmq does not say which connection has proved its key; but a CURVE server sends who has not nothing beyond its
greeting, its WELCOME and a refusal, and who has a READY at once: what the peer has acknowledged tells them apart.

Invariants: of more than MOST unproven connections the oldest are closed, those of the last second only where there are
more than CROWD; a connection with a proved key is never closed here.  Where this thread is behind, libzmq waits for it,
and accepts no connection meanwhile.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading

import zmq

from hpcrl.toolbox.signs import LastSign
from hpcrl.toolbox.unproven import MOST, crowd

#: more than MOST may be open where they are of the last YOUNG seconds, as when thousands of ranks start
CROWD, YOUNG = 2_048, 1.0
#: bytes that a server sends before a key is proved: ZMTP's greeting, a WELCOME, and an ERROR of up to 40
BEFORE_PROOF = 64 + 170 + 40
#: struct tcp_info of Linux: where tcpi_bytes_acked is
_ACKED = slice(120, 128)
_EVENT = struct.Struct("=HI")
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class UnprovenPeers:
    """Watches a bound CURVE server's socket until that is closed, in a thread of its own.

    Attributes:
        closed: connections that were closed here.
    """

    def __init__(self, sock: zmq.Socket) -> None:
        self._crowd = crowd(CROWD)
        self._most = min(MOST, self._crowd)
        self._port = int(sock.last_endpoint.rsplit(b":", 1)[1])
        self._accepted: dict[int, LastSign] = {}  # by descriptor, oldest first
        self.closed = 0
        at = f"inproc://unproven-{id(self)}"
        sock.monitor(at, _EVENTS)
        self._events = zmq.Context.shadow(sock.context.underlying).socket(zmq.PAIR)
        self._events.linger = 0
        self._events.connect(at)
        threading.Thread(target=self._watch, name="unproven", daemon=True).start()

    def _watch(self) -> None:
        try:
            while True:
                crowded = len(self._accepted) > self._most
                if self._events.poll(1000 * YOUNG / 4 if crowded else None):
                    head, _ = self._events.recv_multipart()
                    kind, descriptor = _EVENT.unpack(head)
                    if kind == zmq.EVENT_MONITOR_STOPPED:
                        return
                    self._accepted.pop(descriptor, None)
                    if kind == zmq.EVENT_ACCEPTED:
                        self._accepted[descriptor] = LastSign()
                self._close_oldest()
        except zmq.ContextTerminated:
            pass
        finally:
            self._events.close()

    def _close_oldest(self) -> None:
        """Forget connections with a key, and close others, until few are left that may have none."""
        while len(self._accepted) > self._most:
            descriptor, accepted = next(iter(self._accepted.items()))
            if len(self._accepted) <= self._crowd and accepted.silence < YOUNG:
                return
            del self._accepted[descriptor]
            self.closed += self._close(descriptor)

    def _close(self, descriptor: int) -> bool:
        """Close a connection of this server unless its peer has proved a key; whether it was.

        The copy of the descriptor stays the same connection whatever libzmq does with its own meanwhile.
        """
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.getsockname()[1] != self._port or _proved(connection):
                    return False
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is gone, or no socket any more
            return False
        return True


def _proved(connection: socket.socket) -> bool:
    """Whether the server has sent what only the holder of a key gets; yes where the kernel does not tell."""
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[_ACKED]
    return len(told) < 8 or int.from_bytes(told, sys.byteorder) > BEFORE_PROOF
