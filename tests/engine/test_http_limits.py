"""Limits of an engine's HTTP before the key, without vLLM: uvicorn with the engine's protocol around a small app."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from hpcrl.engine.http_limits import HEAD, SLICE, HttpLimits, bounded_protocol
from hpcrl.engine.key_guard import admits
from hpcrl.toolbox import few_lines, unproven
from tests.support.attacked import start
from tests.support.crowds import answered_beside_idle, ask_with_pauses
from tests.support.second_user import SecondUser
from tests.support.strangers import costs

KEY = b"k" * 64
WITH_KEY = b"Authorization: Bearer " + KEY + b"\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Behind a guard: answers after the whole body, slowly if asked to."""
    if scope["type"] != "http":
        return
    status = 200 if admits(scope["headers"], b"Bearer " + KEY) else 401
    size, more = 0, status == 200
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(1.0)
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"%d bytes" % size})


def served(work: Callable[[int], Awaitable[Any]], seconds: float = 15.0, **more: int) -> Any:
    """What `work` returns, given the port of a server."""

    async def main() -> Any:
        sock = socket.create_server(("127.0.0.1", 0), backlog=512)
        http = bounded_protocol(KEY, seconds, **more)
        config = uvicorn.Config(app, http=http, lifespan="off", log_config=None, timeout_keep_alive=30)
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


def test_a_connection_without_a_request_does_not_stay() -> None:
    """Neither one that says nothing nor one that never comes to an end; a request that takes its time is answered."""
    words = [b"", b"GET / HTTP/1.1\r\nHost: x\r\nA: ", b"GET /slow HTTP/1.1\r\nHost: x\r\n" + WITH_KEY + b"\r\n"]

    async def work(port: int) -> Any:
        return await asyncio.gather(*(talk(port, word) for word in words))

    silent, half, asked = served(work, 0.3)
    assert silent[0] < 10 and half[0] < 10 and silent[1] == b""
    assert b"200 OK" in asked[1] and asked[0] >= 1.0


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
    """A request line with headers is ended at its limit, however it is made up, long before the connection's time."""
    elapsed, answer = served(lambda port: talk(port, *[said] * 20))
    assert elapsed < 10
    assert b"200" not in answer


def test_no_body_without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without the key is answered, and its body is not read; with the key it is read to its end."""
    got = []
    feed = AutoHTTPProtocol.data_received
    monkeypatch.setattr(
        AutoHTTPProtocol,
        "data_received",
        lambda self, data: (got.append(len(data)), feed(self, data)),
    )
    large = b"Content-Length: 20000000\r\nConnection: close\r\n"
    served(lambda port: talk(port, b"POST / HTTP/1.1\r\n" + large + b"\r\n", *[bytes(1_000_000)] * 20))
    assert sum(got) < HEAD
    _, answer = served(lambda port: talk(port, b"POST / HTTP/1.1\r\n" + large + WITH_KEY + b"\r\n", bytes(20_000_000)))
    assert b"20000000 bytes" in answer


def test_refusal_ends_the_connection() -> None:
    """Of requests in a row over one connection without a key those of the first bytes are answered, and it is closed;
    with the key each is answered."""
    ask = b"GET / HTTP/1.1\r\nHost: x\r\n"
    _, refused = served(lambda port: talk(port, (ask + b"\r\n") * 10_000))
    _, answered = served(lambda port: talk(port, (ask + WITH_KEY + b"\r\n") * 5 + ask + b"\r\n"), 0.3)
    assert refused.count(b" 401 ") <= SLICE / len(ask)
    assert answered.count(b" 200 ") == 5


def test_oldest_without_key_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many connections without a key the oldest are closed, and none that has brought one."""
    monkeypatch.setattr("hpcrl.engine.http_limits.MOST", 8)
    monkeypatch.setattr(unproven, "YOUNG", 0.0)

    async def work(port: int) -> tuple[list[bool], bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n" + WITH_KEY + b"\r\n")
        await reader.readuntil(b"bytes")
        idle = []
        for _ in range(30):
            idle.append(await asyncio.open_connection("127.0.0.1", port))
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        ended = [one.at_eof() or one.exception() is not None for one, _ in idle]
        writer.write(b"GET / HTTP/1.1\r\nConnection: close\r\n" + WITH_KEY + b"\r\n")
        answer = await asyncio.wait_for(reader.read(), 20)
        for _, one in [(None, writer), *idle]:
            one.close()
        return ended, answer

    ended, answer = served(work)
    assert ended == [True] * 22 + [False] * 8
    assert b"200 OK" in answer


@pytest.mark.process
def test_honest_requests_at_once_are_answered() -> None:
    """1,500 connections at once, each with the key, all get their answer from a server that is busy meanwhile."""
    request = b"GET / HTTP/1.1\r\nHost: x\r\n" + WITH_KEY + b"\r\n"
    assert served(lambda port: ask_with_pauses(port, request, 1_500), concurrency=512) == 1_500


def test_as_many_stay_as_the_run_asks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many connections as samples are asked for at once stay open before they have brought the key."""
    monkeypatch.setattr("hpcrl.engine.http_limits.MOST", 8)
    monkeypatch.setattr(unproven, "YOUNG", 0.0)

    async def work(port: int) -> int:
        made = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        await asyncio.sleep(0.3)
        for _, one in made:
            one.close()
        return sum(not (one.at_eof() or one.exception()) for one, _ in made)

    assert served(work, concurrency=10) == 20
    assert served(work) == 8


def test_idle_longer_than_a_client_keeps_it() -> None:
    """With the key a connection stays for twice the time that a client of ours keeps it, also after a long answer that
    ends just before the server looks."""

    async def work(port: int) -> tuple[float, bytes]:
        slow = b"GET /slow HTTP/1.1\r\nHost: x\r\n" + WITH_KEY + b"\r\n"
        return await talk(port, slow)

    elapsed, answer = served(work, 0.8)  # looks at 0.8 s, while it is at work, and at 1.6, 2.4, 3.2 s
    assert b"200 OK" in answer
    assert elapsed >= 1.0 + 2 * 0.8


def test_nothing_stays_of_a_closed_connection() -> None:
    """A connection that has ended is not kept until its time would have been over."""

    async def work(port: int) -> int:
        for _ in range(20):
            await talk(port, b"\x00 BAD\r\n\r\n")
        await asyncio.sleep(0.1)
        gc.collect()
        return sum(
            issubclass(type(found), HttpLimits) for found in gc.get_objects()
        )  # some have a __class__ that raises

    assert served(work) <= 1


def test_bad_requests_write_few_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first bad requests are logged, a line each without traceback; then one a time with their number."""
    monkeypatch.setattr(few_lines, "FIRST", 3)

    async def work(port: int) -> None:
        for _ in range(20):
            await talk(port, b"\x00 BAD\r\n\r\n")

    with caplog.at_level(logging.WARNING):
        served(work)
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 3
    assert not any(record.exc_info for record in lines)


@pytest.mark.process
def test_a_thousand_strangers_cost_little(second_user: SecondUser, tmp_path: Path) -> None:
    """As many connections, each with what costs most, take at most 64 MB of an engine's server, and honest requests are
    answered meanwhile."""
    pair = [start("engine", tmp_path / name) for name in ("attacked", "other")]
    for kind, cost in costs(second_user, ("idle", "headers", "pipeline"), *pair).items():
        assert cost.grown <= 64e6, (kind, cost)


@pytest.mark.process
def test_strangers_reset_no_honest_request(second_user: SecondUser, tmp_path: Path) -> None:
    """While a stranger keeps 1,000 idle connections, 300 honest ones at a time are all answered."""
    assert answered_beside_idle(start("engine", tmp_path / "engine"), second_user) == {300}
