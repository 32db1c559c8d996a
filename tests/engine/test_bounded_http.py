"""The limit of an engine's HTTP, without vLLM: uvicorn with the engine's protocol around a small app."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from hpcrl.engine.key_guard import admits
from hpcrl.engine.server import HEAD, bounded_http

KEY = b"k" * 64
WITH_KEY = b"Authorization: Bearer " + KEY + b"\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Behind a guard: answers after the whole body."""
    status = 200 if admits(scope["headers"], b"Bearer " + KEY) else 401
    size, more = 0, status == 200
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"%d bytes" % size})


def served(work: Callable[[int], Awaitable[Any]]) -> Any:
    """What `work` returns, given the port of a server."""

    async def main() -> Any:
        sock = socket.create_server(("127.0.0.1", 0), backlog=512)
        config = uvicorn.Config(app, http=bounded_http(), lifespan="off", log_config=None, timeout_keep_alive=30)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            return await work(sock.getsockname()[1])
        finally:
            server.should_exit = True
            await serving

    return asyncio.run(main())


async def talk(port: int, *said: bytes) -> tuple[float, bytes]:
    """Seconds until the server has closed the connection, and what it has said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    begun, answer = time.monotonic(), b""
    try:
        for words in said:
            writer.write(words)
            await asyncio.wait_for(writer.drain(), 20)
        answer = await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        pass
    writer.close()
    return time.monotonic() - begun, answer


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n" + b"a:\r\n" * HEAD,
        b"GET / HTTP/1.1\r\nA: " + b"x" * 3 * HEAD,
        b"GET /" + b"x" * 3 * HEAD,
    ],
    ids=["lines", "line", "url"],
)
def test_headers_without_end(said: bytes) -> None:
    """They end the connection at the limit, however they are made up."""
    elapsed, answer = served(lambda port: talk(port, *[said] * 20))
    assert elapsed < 10
    assert b"200" not in answer


def test_requests_in_a_row_are_answered() -> None:
    """Also after many bytes of headers and bodies in all."""
    ask = b"POST / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 20_000 + b"\r\n" + WITH_KEY
    large = ask + b"Content-Length: 2000000\r\n\r\n" + bytes(2_000_000)
    last = b"GET / HTTP/1.1\r\nConnection: close\r\n" + WITH_KEY + b"\r\n"
    _, answer = served(lambda port: talk(port, *[large] * 5, last))
    assert answer.count(b" 200 ") == 6 and answer.count(b"2000000 bytes") == 5


def test_body_without_a_key_is_not_kept() -> None:
    large = b"POST / HTTP/1.1\r\nContent-Length: 20000000\r\n\r\n"
    _, answer = served(lambda port: talk(port, large, *[bytes(100_000)] * 200))
    assert b" 200 " not in answer
