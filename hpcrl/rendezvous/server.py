"""The server of a store: a thread of the process that opened it, on one address, for holders of the run's keys alone.

Invariants: a peer has proved to hold its key (CURVE, ZeroMQ RFC 26) before anything that it says is read; until then it
can make the server keep a few hundred bytes, and for HANDSHAKE milliseconds; what a peer says never ends the server.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading

import msgspec
import zmq

from hpcrl.errors import UsageError
from hpcrl.queue import auth
from hpcrl.queue.frames import LIMIT, cut, joined
from hpcrl.queue.sockets import HANDSHAKE, endpoint
from hpcrl.queue.unproven import UnprovenPeers
from hpcrl.rendezvous.table import MAX_ASK, Table, to_ask, to_bytes

ZAP = "inproc://zeromq.zap.01"  #: where libzmq asks who may come in (ZeroMQ RFC 27)


class StoreServer:
    """A store that runs until `close`, or to the end of the process.

    Raises:
        UsageError: if `address` cannot be bound.
    """

    def __init__(self, address: str, keys: auth.ServerKeys) -> None:
        self.table = Table()
        self._known = {auth.key_bytes(key) for key in keys.clients}
        self._context = zmq.Context()
        self._door = self._context.socket(zmq.REP)
        self._door.bind(ZAP)
        self._socket = self._context.socket(zmq.ROUTER)
        auth.lock_server(self._socket, keys)
        self._socket.maxmsgsize = LIMIT
        self._socket.ipv6 = True
        self._socket.linger = 1_000
        self._socket.handshake_ivl = HANDSHAKE
        self._socket.backlog = 512
        self._socket.sndhwm = self._socket.rcvhwm = 0  # members ask one thing at a time
        self.address = address
        try:
            self._socket.bind(endpoint(_numeric(address), 0))
        except (zmq.ZMQError, OSError) as error:
            self._context.destroy(0)
            reason = error.strerror or str(error)
            raise UsageError(
                f"cannot listen on {address}: {reason}", "does the plan name this host? see --interface"
            ) from error
        self.port = int(self._socket.last_endpoint.rsplit(b":", 1)[1])
        UnprovenPeers(self._socket)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is due and let go of the port."""
        self._ended.set()
        self._thread.join(5)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._door, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        while not self._ended.is_set():
            ready = dict(poller.poll(200))
            if self._door in ready:
                self._judge(self._door.recv_multipart())
            for _ in range(1000 if self._socket in ready else 0):  # not for ever: others wait at the door
                try:
                    self._hear(*self._socket.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
                except (TypeError, ValueError, msgspec.MsgspecError):
                    continue  # no Ask: nothing that a member of this run sends
        self._socket.close()
        self._door.close()
        self._context.term()

    def _judge(self, question: list[bytes]) -> None:
        """Answer libzmq: let in who proved to hold a key of this run."""
        known = len(question) == 7 and question[5] == b"CURVE" and question[6] in self._known
        status = [b"200", b"OK", b"member"] if known else [b"400", b"no key of this run", b""]
        self._door.send_multipart([b"1.0", question[1] if len(question) > 1 else b"", *status, b""])

    def _hear(self, member: bytes, *frames: bytes) -> None:
        for other, answer in self.table.take(member, to_ask.decode(joined(frames, MAX_ASK))):
            with contextlib.suppress(zmq.ZMQError):  # a member that is gone
                self._socket.send_multipart([other, *cut(to_bytes(answer))], zmq.NOBLOCK)


def _numeric(host: str) -> str:
    """The address of a host.

    Raises:
        OSError: if it has none.
        UsageError: if it means every interface.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    if ipaddress.ip_address(str(found)).is_unspecified:
        raise UsageError(f"{host} means every interface", "name one host or address in the hostfile")
    return str(found)
