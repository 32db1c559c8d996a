"""Connections to the endpoint, and what they may cost before a request over them has brought a key.

aiohttp leaves a connection that never asks open for an hour, and writes a traceback whenever bytes are no request.

Invariants: until a key has come over it, a connection is read SLICE bytes at a time, and ends after IDLE seconds, as
soon as a request line with its headers has more than HEAD bytes, or all that was sent more than ALL; of many of them
`toolbox/unproven.py` closes some; a key counts once the headers that bring it are there, whenever the handler of the
request may begin; of requests that are none a few lines are logged, and no traceback.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hpcrl.toolbox.few_lines import FewLines
from hpcrl.toolbox.unproven import MOST, UnprovenConnections

IDLE = 15.0  #: seconds until a connection must have brought a key
#: bytes of a request before its body, and of all that comes before the key has been looked at; bytes that are read
#: together
HEAD, ALL, SLICE = 2**16, 2**17, 2**13
_END = b"\r\n\r\n"  # of the headers
_HEADERS = (
    re.compile(rb"\r\nauthorization:[ \t]*bearer ([^\r\n]*)", re.IGNORECASE),
    re.compile(rb"\r\nx-api-key:([^\r\n]*)", re.IGNORECASE),
)
_PATH = re.compile(rb"POST /(hpcrl-[\w-]+)/")  # a request that has its key in the path


class Connections:
    """What makes the protocol of each connection, for `create_server`."""

    def __init__(self, server: web.Server, opens: Callable[[str], bool]) -> None:
        """Create one.

        Args:
            opens: whether a key opens something now.
        """
        self.server = server
        self.opens = opens
        self.unproven = UnprovenConnections[Connection](Connection.end, MOST)
        self.log = logging.Logger("hpcrl.endpoint", logging.WARNING)
        self.log.parent = logging.getLogger("aiohttp.server")
        self.log.addFilter(FewLines(_caused_by_a_client))

    def __call__(self) -> Connection:
        return Connection(self)


class Connection(web.RequestHandler):
    """aiohttp's own protocol with these limits."""

    def __init__(self, connections: Connections) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(connections.server, loop=loop, access_log=None, logger=connections.log)
        self._connections = connections
        self._sent = 0
        self._head = b""
        self._asked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._read = getattr(transport, "max_size", None)
        if self._read is not None:  # of asyncio's own loop
            transport.max_size = SLICE  # type: ignore[attr-defined]
        self._limit = asyncio.get_running_loop().call_later(IDLE, self.drop)
        self._connections.unproven.made(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.proved()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        unproven = self._connections.unproven
        if not self._asked:
            self._read_head(data)
        if self in unproven:
            self._sent += len(data)
            if self._sent > (ALL if self._asked else HEAD):
                self.drop()
                return
            unproven.heard(self, self._sent)
        super().data_received(data)

    def _read_head(self, data: bytes) -> None:
        """Look for the end of the first request's headers, and for a key in them."""
        head, end, _ = (self._head + data).partition(_END)
        if not end:
            self._head = head if len(head) <= SLICE else head[-len(_END) + 1 :]
            return
        self._asked, self._head = True, b""
        named = _PATH.match(head)
        given = [[named[1]]] if named else [header.findall(head) for header in _HEADERS]
        if any(len(keys) == 1 and self._connections.opens(keys[0].decode("latin-1").strip()) for keys in given):
            self.proved()

    def proved(self) -> None:
        """A key has come over it: the limits are over."""
        self._connections.unproven.gone(self)
        self._limit.cancel()
        if self._read is not None and self.transport is not None:
            self.transport.max_size = self._read  # type: ignore[attr-defined]

    def drop(self) -> None:
        """End it unless it has brought a key."""
        if self in self._connections.unproven:
            self._connections.unproven.gone(self)
            self.end()

    def end(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def _caused_by_a_client(record: logging.LogRecord) -> bool:
    reason = record.exc_info[1] if record.exc_info else None
    return isinstance(reason, HttpProcessingError | ConnectionError)
