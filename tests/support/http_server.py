"""A small HTTP server for tests: it answers what it is told, in order, and keeps what it was asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server:
    """Answers POST requests on the loopback interface.  answers: (status, body), the last one for ever; delay: seconds
    before each."""

    def __init__(self, answers: Sequence[tuple[int, bytes]], delay: float = 0.0) -> None:
        self.bodies: list[bytes] = []
        self.busiest = self._now = 0
        lock, server = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with lock:
                    server._now += 1
                    server.busiest = max(server.busiest, server._now)
                    status, answer = answers[min(len(server.bodies), len(answers) - 1)]
                    server.bodies.append(body)
                time.sleep(delay)
                with lock:
                    server._now -= 1
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: Any) -> None:
                return None

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/score"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(5)
