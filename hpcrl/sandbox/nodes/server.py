"""The server of a node with sandboxes: it hands boxes of its own pool to clients with the key.

    GET    /CLIENT/beats      a line every BEAT seconds, for as long as the client is there
    PUT    /CLIENT/boxes/N    open a box under the client's number
    POST   /CLIENT/boxes/N    ask the box one question (`hpcrl.sandbox.inside.frames`): run, read, write and so on
    DELETE /CLIENT/boxes/N    close it

Invariants: nothing of a request is read before its key; with the connection of a client's GET, and with this process,
end its boxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.sandbox import BoxLimits, SandboxLost, SandboxPool, Unconfined
from hpcrl.sandbox.box_line import BoxLine
from hpcrl.sandbox.inside.frames import TRANSFER, IncomingMessages, pack

BEAT = 2.0  #: seconds between two lines
SILENCE = 15.0  #: seconds without a line, or without a kernel's receipt of one, until the other side counts as lost
MOST = TRANSFER + (8 << 20)  #: bytes of a request


class BoxRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box that is wanted.

    Attributes:
        limits: the fields of a `BoxLimits`.
    """

    image: str
    limits: dict[str, Any]


class BoxError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why there is no box, or no answer.

    Attributes:
        kind: one of KINDS; or "full": another node may have room.
    """

    kind: str
    text: str = ""
    hint: str = ""


#: what is said of an error -> which it is; the first that fits counts
KINDS = {
    "unconfined": Unconfined,
    "usage": UsageError,
    "lost": SandboxLost,
    "error": HpcrlError,
}


@dataclass
class _OpenBox:
    """A box that a client has.

    Attributes:
        exits: gives it back.
        numbers: of its questions that started a command, the client's -> the line's.
    """

    line: BoxLine
    exits: contextlib.AsyncExitStack
    numbers: dict[int, int] = field(default_factory=dict)


class SandboxServer:
    """Serves boxes of `pool` until it is closed."""

    def __init__(self, key: str, pool: SandboxPool, say: Callable[[str], None]) -> None:
        self._expected = f"Bearer {key}".encode()
        self._pool = pool
        self._say = say
        self._clients: dict[str, dict[int, _OpenBox]] = {}
        app = web.Application(client_max_size=MOST, middlewares=[self._answered])
        box = r"/{client}/boxes/{number:\d+}"
        app.router.add_get("/{client}/beats", self._beat)
        app.router.add_put(box, self._open)
        app.router.add_post(box, self._ask)
        app.router.add_delete(box, self._close)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)

    async def start(self, host: str) -> int:
        """Listen at an address of this machine; returns the port.

        Raises:
            HpcrlError: if that cannot be had.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, 0, backlog=512).start()
        except OSError as error:
            raise HpcrlError(
                f"sandboxes: cannot listen on {host}: {error.strerror}", "is this the host that the plan names?"
            ) from error
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """End every box, and let go of the port."""
        await self._runner.cleanup()
        await self._pool.close()

    @web.middleware
    async def _answered(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Ask for the key, and say what goes wrong as a BoxError."""
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, self._expected):
            return web.Response(status=401)
        try:
            return await handler(request)
        except web.HTTPException:
            raise
        except HpcrlError as error:
            kind = next(name for name, kind in KINDS.items() if isinstance(error, kind))
            found = BoxError(kind, error.what, error.hint)
        except (msgspec.MsgspecError, ValueError, TypeError, KeyError) as error:  # of another version, or gone astray
            found = BoxError("usage", f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  (its client waits for an answer, whatever went wrong here)
            self._say(f"sandboxes: {type(error).__name__}: {error}")
            found = BoxError("lost", f"its node says {type(error).__name__}: {error}")
        return web.Response(status=409, body=msgspec.json.encode(found))

    async def _beat(self, request: web.Request) -> web.StreamResponse:
        """Show that this process is alive until the client is not; its kernel's silence counts, whatever it does."""
        assert request.transport is not None
        connection = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE * 1000))
        client = request.match_info["client"]
        boxes = self._clients[client] = {}
        answer = web.StreamResponse()
        try:
            await answer.prepare(request)
            while True:
                await answer.write(b"\n")
                await asyncio.sleep(BEAT)
        finally:
            del self._clients[client]
            for box in boxes.values():
                await box.exits.aclose()

    def _boxes(self, request: web.Request) -> tuple[dict[int, _OpenBox], int]:
        """(the boxes of a client, the number of one).

        Raises:
            SandboxLost: if the client is gone.
        """
        boxes = self._clients.get(request.match_info["client"])
        if boxes is None:
            raise SandboxLost("its node has lost its user")
        return boxes, int(request.match_info["number"])

    async def _open(self, request: web.Request) -> web.Response:
        boxes, number = self._boxes(request)
        wish = msgspec.json.decode(await request.read(), type=BoxRequest)
        if self._pool.full:
            return web.Response(status=409, body=msgspec.json.encode(BoxError("full")))
        exits = contextlib.AsyncExitStack()
        line = await exits.enter_async_context(self._pool.line(wish.image, BoxLimits(**wish.limits)))
        if number in boxes or self._clients.get(request.match_info["client"]) is not boxes:
            await exits.aclose()
            raise SandboxLost("its node has lost its user")
        boxes[number] = _OpenBox(line, exits)
        return web.Response(body=bytes([line.layered]))

    async def _ask(self, request: web.Request) -> web.Response:
        boxes, number = self._boxes(request)
        box = boxes.get(number)
        [(head, body)] = IncomingMessages().feed(await request.read())
        if box is None:
            raise SandboxLost("it was closed")
        asked = head.pop("n")
        if "id" in head:
            head["id"] = box.numbers.get(head["id"], 0)
        try:
            question, future = box.line.begin(body, **head)
            if head.get("do") == "run":
                box.numbers[asked] = question
            try:
                head, body = await future
            finally:
                box.line.forget(question)
        except SandboxLost:
            raise SandboxLost(await self._pool.reason(box.line) or box.line.lost or "it has ended") from None
        return web.Response(body=pack(head | {"n": asked}, body))

    async def _close(self, request: web.Request) -> web.Response:
        boxes, number = self._boxes(request)
        if box := boxes.pop(number, None):
            await box.exits.aclose()
        return web.Response()
