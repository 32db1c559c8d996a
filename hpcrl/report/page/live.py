"""The page of a run while it trains: served on this machine's loopback, to browsers that have the key in its address.

Invariants: only GET is answered, only under the key, and only with the page; it is made at most every FRESH seconds,
however many ask; nothing is served any more once the context is left.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from hpcrl.errors import UsageError
from hpcrl.plain_text import strip_control
from hpcrl.toolbox.signs import LastSign

HERE = "127.0.0.1"
FRESH = 5.0  #: seconds that a page is served for before another one is made
LINGER = 15.0  #: seconds in which a browser gets the last page: it asks every REFRESH
REFRESH = 10
MOST = 16  #: connections
PATIENCE = 10.0  #: seconds for a request to arrive


class BoundedServer(ThreadingHTTPServer):
    """A server with MOST connections at a time; a further one is closed at once."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        self._room = threading.BoundedSemaphore(MOST)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: the terminal shows the run, and the browser asks again."""


class LivePages:
    """Serves what `make` returns; a context.

    Args:
        make: the HTML, which asks for itself again after REFRESH seconds.
        port: 0 for any.

    Raises:
        UsageError: if the port is taken.
    """

    def __init__(self, make: Callable[[], str], port: int = 0) -> None:
        self._make = make
        self._key = secrets.token_urlsafe(16)
        self._lock = threading.Lock()
        self._page = b""
        self._made = LastSign(ago=FRESH)
        self._asked = LastSign(ago=3 * REFRESH)
        try:
            self._server = BoundedServer((HERE, port), self._handler())
        except (OSError, OverflowError) as error:
            raise UsageError(f"--port {port} cannot be had: {error}", "choose another, or leave it out") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), daemon=True)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HERE}:{self._server.server_port}/{self._key}/"

    @property
    def words(self) -> str:
        """What to do with the address."""
        port = self._server.server_port
        forward = f"ssh -L {port}:{HERE}:{port} {strip_control(socket.gethostname())}"
        return f"{self.address}\nfrom another machine first: {forward}"

    def __enter__(self) -> LivePages:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._asked.silence < 3 * REFRESH:  # a browser looks: at the end, too
            time.sleep(LINGER)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE)

    def _current(self) -> bytes:
        with self._lock:
            self._asked.heard()
            if self._made.silence >= FRESH:
                self._page = self._make().encode("utf-8", errors="replace")
                self._made.heard()
            return self._page

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        pages = self

        class Handler(BaseHTTPRequestHandler):
            timeout = PATIENCE
            server_version = "hpcrl"
            sys_version = ""

            def do_GET(self) -> None:
                given = self.path.strip("/").encode()
                if not secrets.compare_digest(given, pages._key.encode()):
                    self.send_error(HTTPStatus.NOT_FOUND)
                    return
                page = pages._current()
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(page)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("Referrer-Policy", "no-referrer")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: the terminal shows the run."""

        return Handler
