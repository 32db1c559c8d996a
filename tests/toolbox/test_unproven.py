"""Which connections without a key are closed when there are many."""

from __future__ import annotations

import asyncio
import resource

import pytest

from hpcrl.toolbox import unproven
from hpcrl.toolbox.signs import LastSign
from hpcrl.toolbox.unproven import LITTLE, UnprovenConnections


def closed(work: object, most: int = 2, **numbers: float) -> list[str]:
    """The connections that are closed, in order, when `work` is done with a server's."""

    async def main() -> list[str]:
        found: list[str] = []
        await work(UnprovenConnections(found.append, most))  # type: ignore[operator]
        return found

    with pytest.MonkeyPatch.context() as patch:
        for name, number in numbers.items():
            patch.setattr(unproven, name, number)
        return asyncio.run(main())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds at which connections are made and looked at, to be set by hand."""
    now = [0.0]
    monkeypatch.setattr(unproven, "LastSign", lambda: LastSign(clock=lambda: now[0]))
    return now


def test_silent_ones_are_closed_first(clock: list[float]) -> None:
    """Of old connections those that have sent nothing are closed first, then the oldest of the others."""

    async def work(server: UnprovenConnections[str]) -> None:
        for name in ("asks", "silent", "speaks", "mute"):
            server.made(name)
            if name in ("asks", "speaks"):
                server.heard(name, 1)
        clock[0] = 5.0
        server.made("later")
        server.made("last")
        assert "later" in server and "last" in server

    assert closed(work) == ["silent", "mute", "asks", "speaks"]


def test_young_ones_stay(clock: list[float]) -> None:
    """None is closed in its first seconds though there are more than may stay; afterwards the oldest are, whether or
    not another is made."""

    async def work(server: UnprovenConnections[int]) -> None:
        for number in range(10):
            server.made(number)
        assert len(server) == 10
        clock[0] = 5.0
        async with asyncio.timeout(20):
            while len(server) > 2:
                await asyncio.sleep(0.05)

    assert closed(work, YOUNG=0.3) == list(range(8))


def test_crowd_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a quarter of the files that may be open are never kept, however young they are: the oldest go."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (80, 80))

    async def work(server: UnprovenConnections[int]) -> None:
        for number in range(25):
            server.made(number)
            if number % 2:
                server.heard(number, 1)

    assert closed(work) == list(range(5))


def test_who_sends_much_has_no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection with more bytes than an honest one needs is closed first, and only some of them stay at all."""

    async def work(server: UnprovenConnections[str]) -> None:
        for name in ("a", "b", "c"):
            server.made(name)
        server.heard("b", LITTLE + 1)

    async def some(server: UnprovenConnections[int]) -> None:
        for number in range(20):
            server.made(number)
            server.heard(number, LITTLE + 1)

    assert closed(work) == ["b"]
    assert closed(some, most=100, LOUD=8) == list(range(12))


def test_gone_ones_do_not_count() -> None:
    """One that has brought a key is never closed, and one that is told of later is not taken in again."""

    async def work(server: UnprovenConnections[int]) -> None:
        for number in range(10):
            server.made(number)
            server.gone(number)
            server.heard(number, LITTLE + 1)
        assert not len(server) and 3 not in server

    assert closed(work, YOUNG=0.0) == []
