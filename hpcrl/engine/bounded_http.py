"""uvicorn's HTTP with a limit for what comes before a request's body, for its option `http`.

With httptools, uvicorn itself keeps a request line and headers without end, before the guard of the engine's key sees
the request.  No body is read of a request that the guard refuses.
"""

from __future__ import annotations

from typing import Any

HEAD = 2**16  #: bytes of a request before its body


def bounded_http() -> type[Any]:
    """uvicorn's protocol that ends a connection over which more than HEAD bytes have come and no request."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class BoundedHttp(AutoHTTPProtocol):
        came = 0  #: bytes since the last request

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            waiting = self.cycle is before and (before is None or before.response_complete)
            self.came = self.came + len(data) if waiting else 0
            if self.came > HEAD:
                self.transport.abort()

    return BoundedHttp
