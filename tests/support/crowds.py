"""Many honest clients of an HTTP server at the same moment, each with a connection of its own."""

from __future__ import annotations

import asyncio
import selectors
import socket
import time

from tests.support.attacked import Attacked
from tests.support.second_user import SecondUser
from tests.support.strangers import STRANGER

HERE = "127.0.0.1"
WAIT = 60.0  #: seconds until all have their answer


def ask_at_once(port: int, request: bytes, count: int) -> int:
    """How many of `count` clients are answered with 200; each sends the request as soon as it is connected."""
    waiting, answered = selectors.DefaultSelector(), 0
    end = time.monotonic() + WAIT
    for _ in range(count):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex((HERE, port))
        waiting.register(one, selectors.EVENT_WRITE)
    while waiting.get_map() and time.monotonic() < end:
        for key, event in waiting.select(1.0):
            one = key.fileobj
            assert isinstance(one, socket.socket)
            try:
                if event & selectors.EVENT_WRITE:
                    one.sendall(request)
                    waiting.modify(one, selectors.EVENT_READ)
                    continue
                answered += b" 200 OK" in one.recv(65536)
            except OSError:  # it was closed
                pass
            waiting.unregister(one)
            one.close()
    for key in list(waiting.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    return answered


async def ask_with_pauses(port: int, request: bytes, count: int, pause: float = 0.3) -> int:
    """The same, while this event loop, which serves them, does something else for `pause` seconds again and again."""
    asking = asyncio.create_task(asyncio.to_thread(ask_at_once, port, request, count))
    while not asking.done():
        time.sleep(pause)
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
    return await asking


def answered_beside_idle(one: Attacked, stranger: SecondUser) -> set[int]:
    """How many of 300 honest requests at a time were answered, in every round, while a stranger kept 1,000 idle
    connections; the server is closed afterwards."""
    keeping = stranger.start(STRANGER, "idle", HERE, str(one.port), "1000", "6")
    request = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {one.key}\r\n\r\n".encode()
    found = set()
    while keeping.poll() is None:
        found.add(ask_at_once(one.port, request, 300))
    one.close()
    return found
