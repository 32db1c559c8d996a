"""What a client of an engine's HTTP may cost before it has proved the engine's key: bytes, seconds, connections.

uvicorn itself waits for ever for the first byte of a request and for its last, and with httptools it keeps headers
without end.  This is uvicorn's protocol with limits, for its option `http`.

Invariants: until a request with the key has come over a connection, a request line with its headers of more than HEAD
bytes ends it, no body is read, it is closed after `seconds` to twice that, and of many such connections
`toolbox/unproven.py` closes some; with the key it is closed when no request has come for two to four times
`seconds`, which is later than a client of ours does it itself; a request that is answered takes the time it takes.
"""

from __future__ import annotations

import logging
from typing import Any

from hpcrl.engine.key_guard import admits
from hpcrl.run.peers import IDLE
from hpcrl.toolbox.few_lines import FewLines
from hpcrl.toolbox.unproven import MOST, UnprovenConnections

#: bytes of a request before its body; bytes that are looked at together
HEAD, SLICE = 2**16, 2**13


def bounded_protocol(key: bytes, seconds: float = IDLE, concurrency: int = 0) -> type[Any]:
    """uvicorn's HTTP with these limits, for an engine with this key.

    Args:
        seconds: how often a connection is looked at: as long as clients of ours keep an idle one.
        concurrency: samples that are asked for at once; other requests come on top.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    log = logging.Logger("uvicorn.error", logging.WARNING)
    log.parent = logging.getLogger(log.name)
    log.addFilter(FewLines(lambda record: record.levelno == logging.WARNING))
    unproven = UnprovenConnections[HttpLimits](HttpLimits.end, max(MOST, 2 * concurrency))
    own = {"expected": b"Bearer " + key, "seconds": seconds, "unproven": unproven, "log": log}
    return type("BoundedHttp", (HttpLimits, AutoHTTPProtocol), own)


class HttpLimits:
    """What `bounded_protocol` puts in front of uvicorn's protocol.

    Attributes:
        expected: the Authorization header of who has the key.
        unproven: the connections over which it has not come.
    """

    expected: bytes
    seconds: float
    unproven: UnprovenConnections[HttpLimits]
    log: logging.Logger
    # uvicorn's
    cycle: Any
    scope: Any
    transport: Any
    flow: Any
    loop: Any

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self.logger = self.log
        self._last = self._next = None
        self._looks = self._head = 0
        self._proved = self._refused = False
        self._look()
        self.unproven.made(self)

    def end(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.unproven.gone(self)
        if self._next is not None:  # else it would keep a connection that is gone for as long as its time is
            self._next.cancel()
        super().connection_lost(exc)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        for at in range(0, len(data), SLICE):
            if self._refused or self.transport.is_closing() or self.transport.get_protocol() is not self:
                return
            if self._proved:  # what is left
                super().data_received(data[at:] if at else data)  # type: ignore[misc]
                return
            self._receive_unproven(data[at : at + SLICE])

    def _receive_unproven(self, data: bytes) -> None:
        before, self._head = self.cycle, self._head + len(data)
        super().data_received(data)  # type: ignore[misc]
        if self.transport.is_closing():
            return
        if self.transport.get_protocol() is not self:  # a websocket, which the guard ends if it has no key
            self.unproven.gone(self)
        elif self.cycle is before:
            if self._head > HEAD:
                self.log.warning("A request without a key had more than %d bytes of headers.", HEAD)
                self.transport.abort()
            else:
                self.unproven.heard(self, self._head)
        elif admits(self.scope["headers"], self.expected):
            self._proved = True
            self.unproven.gone(self)
        else:  # the guard answers; then uvicorn closes the connection
            self._refused = True
            self.cycle.keep_alive = False
            self.flow.pause_reading()

    def _look(self) -> None:
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # ended, or a websocket by now
            return
        cycle = self.cycle
        at_work = cycle is not None and (cycle is not self._last or not cycle.response_complete)
        self._last, self._looks = cycle, 0 if at_work else self._looks + 1
        if self._looks > (2 if self._proved else 1):
            self.transport.close()
        else:
            self._next = self.loop.call_later(self.seconds, self._look)
