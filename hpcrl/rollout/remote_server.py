"""A server of the user's that answers JSON over HTTP: a reward's (--rm-url), a teacher's (--opd-teacher-url).

Invariants: a request that found no server, or was answered 408, 429 or 5xx, is asked again with growing pauses within
its limit of time; whatever comes is one PeerError, which names the server and says what came.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import aiohttp
import msgspec

from hpcrl.engine.membership.http import client_session
from hpcrl.errors import PeerError
from hpcrl.utils.waiting import Deadline, Pauses, retry_async

ATTEMPTS = 10
PAUSES = Pauses(1.0, 30.0)
CONNECTIONS = 64
AGAIN = {408, 429}  #: HTTP statuses, besides 5xx, after which it is asked again
SHARE = 0.95  #: of a limit of time, so that the error comes before its caller has given up


class StatusError(PeerError):
    """An HTTP status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


class NotJson(PeerError):
    """An answer that is not JSON."""


class RemoteServer:
    """Asks one server; keeps its connections, which belong to the event loop that they were made in."""

    def __init__(self, name: str, url: str, key: str | None = None) -> None:
        """Create one.

        Args:
            name: what errors call it.
            key: a bearer token, if it asks for one.
        """
        self._name = name
        self._url = url
        authorization = {"Authorization": f"Bearer {key}"} if key else {}
        self._headers = {"Content-Type": "application/json"} | authorization
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __str__(self) -> str:
        return self._name

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask_patiently(self, path: str, body: object, limit: float) -> Any:
        """The answer to a POST of `body` as JSON, within SHARE of `limit` seconds.  PeerError."""
        data = msgspec.json.encode(body)
        deadline = Deadline(SHARE * limit)
        spread = hashlib.blake2b(data, digest_size=1).digest()[0] / 256
        try:
            return await retry_async(
                lambda: self.request_json(path, data, deadline.left),
                _may_pass,
                deadline,
                PAUSES.spread(spread),
                ATTEMPTS,
            )
        except NotJson:
            raise
        except PeerError as error:
            attempts = error.attempts  # type: ignore[attr-defined]
            what = f"got no answer from {self} in {attempts} attempts; the last: {error.what}"
            raise PeerError(what) from error

    async def request_json(self, path: str, data: bytes | None = None, seconds: float = 60.0) -> Any:
        """JSON of a GET, or with `data` of a POST.

        Raises:
            PeerError: if there is none, StatusError for a status other than 200.
        """
        if self._session is None or self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._session = client_session(self._headers, CONNECTIONS)
        timeout = aiohttp.ClientTimeout(total=seconds)
        method = "GET" if data is None else "POST"
        try:
            async with self._session.request(method, self._url + path, data=data, timeout=timeout) as answer:
                text = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            why = f"{type(error).__name__}: {error}".rstrip(": ")
            raise PeerError(f"{self} did not answer {path}: {why}" if path else why) from error
        if answer.status != 200:
            raise StatusError(answer.status, text[:300].decode(errors="replace") or str(answer.reason))
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            said = text[:100].decode(errors="replace")
            raise NotJson(f"got no JSON from {self}: {said!r}") from error


def _may_pass(error: Exception) -> bool:
    if isinstance(error, StatusError):
        return error.status >= 500 or error.status in AGAIN
    return isinstance(error, PeerError) and not isinstance(error, NotJson)
