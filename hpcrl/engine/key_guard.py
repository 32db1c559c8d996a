"""The lock on every route of an engine: no request without the key of this engine gets an answer.

    Authorization: Bearer <HMAC of the engine's realm under RUN/keys/http.key>

The realm is INDEX.INCARNATION, or, of an engine that no run has started, a random number, new each time it is served.
A caller without a key gets it in the answer (RFC 9110, 11.5): it is no secret.

vLLM's own --api-key guards some path prefixes only; pausing, weight updates and collective RPC stay open.  This ASGI
middleware stands in front of all routes, those of later vLLM versions and websockets included.

Invariants: the key is read from a file and is in no command line, environment variable, log line or answer; comparison
takes the same time wherever the first difference lies.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from hpcrl.errors import UsageError
from hpcrl.transport.auth import key_of_engine
from hpcrl.utils.untrusted_files import read_given_bytes

KEY_FILE = "HPCRL_HTTP_KEY_FILE"
REALM = "HPCRL_HTTP_KEY_REALM"

Scope = Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = b"application/json"
_REFUSED = b'{"error":"this route asks for the key of this engine: Authorization: Bearer <key>"}'


def read_key() -> bytes:
    """This engine's key: of the run's, in the file that HPCRL_HTTP_KEY_FILE names, and the realm.

    Raises:
        UsageError: if there is none: an open server is not an option.
    """
    path = os.environ.get(KEY_FILE)
    if not path:
        raise UsageError(
            f"{KEY_FILE} is not set: the engine would answer anybody", "it names the file with the HTTP key of the run"
        )
    try:
        key = read_given_bytes(path).strip()
    except OSError as error:
        raise UsageError(f"cannot read the HTTP key of the run in {path}: {error.strerror}") from error
    if len(key) < 32:
        raise UsageError(
            f"the HTTP key of the run in {path} is shorter than 32 characters", "let hpcrl make the keys of the run"
        )
    return key_of_engine(key, _engine_name()).encode()


def _engine_name() -> str:
    return os.environ.get(REALM, "0.0")


class RunKeyGuard:
    """Pure ASGI middleware: 401 for HTTP, close code 1008 for websockets, unless the one Authorization header is
    right."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._expected = b"Bearer " + read_key()
        self._challenge = f'Bearer realm="{_engine_name()}"'.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or admits(scope.get("headers", ()), self._expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await reply(send, 401, JSON, _REFUSED, (b"www-authenticate", self._challenge))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "the key of the run is missing or wrong"})


def admits(headers: Iterable[tuple[bytes, bytes]], expected: bytes) -> bool:
    """Whether the one Authorization header of a request is the expected one."""
    given = [value for name, value in headers if name.lower() == b"authorization"]
    return len(given) == 1 and hmac.compare_digest(given[0], expected)


# ---- what every route of ours reads and writes


def answer(status: int, kind: bytes, body: bytes, *more: tuple[bytes, bytes]) -> list[Message]:
    """The messages of a whole answer: its status, content type, body and further headers."""
    head = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *more]
    return [
        {"type": "http.response.start", "status": status, "headers": head},
        {"type": "http.response.body", "body": body},
    ]


async def reply(send: Send, status: int, kind: bytes, body: bytes, *more: tuple[bytes, bytes]) -> None:
    """Send an `answer`."""
    for message in answer(status, kind, body, *more):
        await send(message)


async def body_of(receive: Receive) -> bytes:
    """A request's body.

    Raises:
        ValueError: if the client has gone.
    """
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ValueError("the client has gone")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
