"""An answer as server-sent events.

A turn is sampled whole, and its events follow one another once it is there.  Until then comments keep the connection:
clients and what stands between give one up on which nothing comes.

Invariants: what fails before the head is sent is an answer with its own status, later an event; a client that leaves
frees its request at once; every wait has an end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from aiohttp import web

FIRST = 2.0  #: seconds within which an error still has a status of its own
PAUSE = 10.0  #: seconds between two comments
SENT = 60.0  #: seconds within which a client has to take what it is sent
COMMENT = b": the turn is being sampled\n\n"


async def stream(
    request: web.Request,
    work: Coroutine[Any, Any, dict[str, Any]],
    events: Callable[[dict[str, Any]], Iterable[bytes]],
    failed: Callable[[Exception], bytes | None],
) -> web.StreamResponse:
    """Send what comes of `work`.

    Args:
        events: of the answer.
        failed: the event of an error, None for one that is none of a client's or an engine's.

    Raises:
        Exception: of `work`, as long as nothing is sent.
    """
    task = asyncio.ensure_future(work)
    response: web.StreamResponse | None = None
    try:
        while not (await asyncio.wait({task}, timeout=FIRST if response is None else PAUSE))[0]:
            response = response or await _start_stream(request)
            await _send(response, COMMENT)
        try:
            pieces = list(events(task.result()))
        except Exception as error:
            said = failed(error)
            if response is None or said is None:
                raise
            pieces = [said]
        response = response or await _start_stream(request)
        await _send(response, b"".join(pieces))
    except _ClientGone:
        return response or web.Response(status=408)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return response


class _ClientGone(Exception):
    """The client has left, or takes nothing."""


async def _start_stream(request: web.Request) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response


async def _send(response: web.StreamResponse, data: bytes) -> None:
    try:
        async with asyncio.timeout(SENT):
            await response.write(data)
    except (ConnectionError, TimeoutError) as error:
        raise _ClientGone from error
