"""What a stranger may cost the endpoint of custom functions before he has brought a key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.rollout.endpoint import connections
from hpcrl.rollout.endpoint.connections import HEAD
from hpcrl.rollout.endpoint.server import Endpoint
from hpcrl.toolbox import few_lines, unproven
from tests.support.attacked import start
from tests.support.crowds import answered_beside_idle, ask_with_pauses
from tests.support.second_user import SecondUser
from tests.support.strangers import costs

HERE = "127.0.0.1"
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def served(work: Callable[[int, bytes], Awaitable[Any]]) -> Any:
    """What `work` returns, given the port of an endpoint and a request with a key."""

    async def main() -> Any:
        endpoint = Endpoint(HERE)
        await endpoint.start()
        key = endpoint.open(object())  # type: ignore[arg-type]
        port = int(endpoint.base_url.rsplit(":", 1)[1].removesuffix("/v1"))
        try:
            return await work(
                port, f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
            )
        finally:
            await endpoint.stop()

    return asyncio.run(main())


async def ended(reader: asyncio.StreamReader, seconds: float = 20.0) -> bool:
    """Whether the server closes the connection within so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            while await reader.read(65536):
                pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


async def ask(pair: Pair, request: bytes) -> bytes:
    reader, writer = pair
    writer.write(request)
    return await asyncio.wait_for(reader.readuntil(b"}]}"), 20)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nA: ", b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_who_brings_no_key_does_not_stay(monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """A connection over which no key has come ends in time, whatever is asked over it; one with a key stays."""
    monkeypatch.setattr(connections, "IDLE", 0.3)

    async def work(port: int, request: bytes) -> None:
        known = await asyncio.open_connection(HERE, port)
        await ask(known, request)
        reader, writer = await asyncio.open_connection(HERE, port)
        writer.write(said)
        assert await ended(reader)
        assert not await ended(known[0], 0.5)
        assert b"200 OK" in await ask(known, request)
        known[1].close()

    served(work)


@pytest.mark.parametrize("said", [b"A: " + b"x" * 3 * HEAD, b"a:\r\n" * HEAD], ids=["line", "lines"])
def test_headers_without_end(said: bytes) -> None:
    """Headers of more than their bound end the connection before its time."""

    async def work(port: int, request: bytes) -> None:
        reader, writer = await asyncio.open_connection(HERE, port)
        writer.write(b"GET / HTTP/1.1\r\n" + said)
        assert await ended(reader, 10.0)

    served(work)


def test_oldest_without_key_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many connections without a key the oldest are closed, and none that has brought one."""
    monkeypatch.setattr(connections, "MOST", 8)
    monkeypatch.setattr(unproven, "YOUNG", 0.0)

    async def work(port: int, request: bytes) -> None:
        known = await asyncio.open_connection(HERE, port)
        await ask(known, request)
        idle = []
        for _ in range(30):
            idle.append(await asyncio.open_connection(HERE, port))
            await asyncio.sleep(0.01)
        assert all(await asyncio.gather(*(ended(reader) for reader, _ in idle[:22])))
        assert not any(await asyncio.gather(*(ended(reader, 0.3) for reader, _ in idle[22:])))
        assert b"200 OK" in await ask(known, request)

    served(work)


def test_key_counts_with_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is proved as soon as the headers with a live key are there, however they come, before any handler;
    one with another key, with two, or with a key in its body, is not."""
    proved = []
    monkeypatch.setattr(connections.Connection, "proved", lambda self: proved.append(self))

    async def work(port: int, request: bytes) -> list[int]:
        head, found = request.removesuffix(b"\r\n").replace(b"GET ", b"POST ") + b"Content-Length: 9\r\n\r\n", []
        bare = b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n"
        for said in ([head], [head[:-40], head[-40:]], [head[:-1], head[-1:]], [head.replace(b"hpcrl-", b"x")]):
            found.append(await heard(port, said, proved))
        found.append(await heard(port, [bare + head], proved))
        as_anthropics = head.replace(b"Authorization: Bearer ", b"x-api-key: ")
        found.append(await heard(port, [as_anthropics], proved))
        found.append(await heard(port, [as_anthropics.replace(b"\r\n\r\n", b"\r\nX-Api-Key: a\r\n\r\n")], proved))
        return found

    assert served(work) == [1, 1, 1, 0, 0, 1, 0]


async def heard(port: int, said: list[bytes], proved: list[object]) -> int:
    """How often a connection counts as proved on which this comes, before it ends."""
    _, writer = await asyncio.open_connection(HERE, port)
    for words in said:
        writer.write(words)
        await asyncio.sleep(0.1)
    found = len(proved)
    writer.close()
    await asyncio.sleep(0.1)
    proved.clear()
    return found


@pytest.mark.process
def test_honest_requests_at_once_are_answered() -> None:
    """1,500 connections at once, each with a key, all get their answer from an endpoint that is busy meanwhile."""
    assert served(lambda port, request: ask_with_pauses(port, request, 1_500)) == 1_500


def test_bad_requests_write_few_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first bytes that are no request are logged, a line each without traceback, and the others by number."""
    monkeypatch.setattr(few_lines, "FIRST", 3)

    async def work(port: int, request: bytes) -> None:
        for _ in range(20):
            reader, writer = await asyncio.open_connection(HERE, port)
            writer.write(b"GET / HTTP/1.1\r\nbad header\r\n\r\n")
            await ended(reader)
            writer.close()

    with caplog.at_level(logging.WARNING):
        served(work)
    assert len(caplog.records) == 3
    assert not any(record.exc_info or "\n" in record.getMessage() for record in caplog.records)


def test_lines_that_are_left_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a minute a line says how many were left out, and what no stranger has caused is left as it is."""
    monkeypatch.setattr(few_lines, "FIRST", 2)
    filtered = few_lines.FewLines(lambda record: record.levelno == logging.WARNING)

    def line(level: int = logging.WARNING) -> logging.LogRecord | None:
        record = logging.LogRecord("x", level, "", 0, "bad %s", ("request",), None)
        return record if filtered.filter(record) else None

    assert [bool(line()) for _ in range(5)] == [True, True, False, False, False]
    monkeypatch.setattr(few_lines, "EVERY", 0.0)
    counted, defect = line(), line(logging.ERROR)
    assert counted is not None and "one of 4" in counted.getMessage()
    assert defect is not None and defect.args == ("request",)


@pytest.mark.process
def test_a_thousand_strangers_cost_little(second_user: SecondUser, tmp_path: Path) -> None:
    """As many connections, each with what costs most, take at most 64 MB of the endpoint's process, and honest requests
    are answered meanwhile."""
    pair = [start("endpoint", tmp_path / name) for name in ("attacked", "other")]
    for kind, cost in costs(second_user, ("idle", "headers", "body", "pipeline"), *pair).items():
        assert cost.grown <= 64e6, (kind, cost)


@pytest.mark.process
def test_strangers_reset_no_honest_request(second_user: SecondUser, tmp_path: Path) -> None:
    """While a stranger keeps 1,000 idle connections, 300 honest ones at a time are all answered."""
    assert answered_beside_idle(start("endpoint", tmp_path / "endpoint"), second_user) == {300}
