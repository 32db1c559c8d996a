"""`slime.utils.http_utils`: `post` to what a function takes for SGLang's router, which is the endpoint, and elsewhere.

The router's port, as text, has the key of the response that is made behind it: `http://{ip}:{port}/generate` names
both, so any HTTP client reaches the engines, and only for that response.

Invariants: a request to the endpoint goes out under the key of the call in which it was made, whatever key the URL
has, so a function may keep a URL; what the endpoint refuses is not asked again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import aiohttp

from hpcrl.engine.membership.http import client_session
from hpcrl.utils.waiting import Deadline, Pauses, retry_async

AGAIN = 1.0  #: seconds until a server that did not answer is asked again
LONGEST = 600.0  #: seconds after which none is
_KEY = re.compile(r"^/hpcrl-[\w-]+(?=/)")
_ANY_KEY = re.compile(r"/hpcrl-[\w-]+(?=/)")


class RouterPort(int):
    """A port that is written with the key behind it."""

    key = ""

    def __new__(cls, port: int, key: str = "") -> RouterPort:
        made = super().__new__(cls, port)
        made.key = key
        return made

    def __str__(self) -> str:
        return f"{int(self)}/{self.key}" if self.key else f"{int(self)}"

    def __format__(self, spec: str) -> str:
        return format(str(self) if not spec else int(self), spec)


@dataclass(frozen=True)
class Router:
    """Where a call asks the engines, and by which key."""

    host: str
    port: RouterPort

    @classmethod
    def from_base_url(cls, base_url: str, key: str) -> Router:
        """That of an endpoint's base_url."""
        parts = urlsplit(base_url)
        host = str(parts.hostname)
        return cls(f"[{host}]" if ":" in host else host, RouterPort(parts.port or 80, key))

    def own(self, url: str) -> str:
        """A URL of the endpoint with this key, "" for another server's."""
        root = f"http://{self.host}:{int(self.port)}"
        if not url.startswith(f"{root}/"):
            return ""
        return f"{root}/{self.port.key}{_KEY.sub('', url[len(root) :])}"


#: of the call that is running
ROUTER: ContextVar[Router | None] = ContextVar("ROUTER", default=None)
_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()


class RequestRefused(Exception):
    """A server said no.  `status` is the number that it said it with.

    Its text is that of every response that is refused so: it has no key, which lets its holder ask the engines.
    """

    def __init__(self, url: str, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"{_ANY_KEY.sub('', url)} answers {status}: {text[:500]}")


async def post(
    url: str, payload: Any, max_retries: int = 60, action: str = "post", headers: Mapping[str, str] | None = None
) -> Any:
    """The answer to a JSON payload: what JSON it is, or its text.

    Args:
        max_retries: how often a server other than the endpoint is asked.

    Raises:
        RequestRefused: if it says no; of others once they were asked so often.
    """
    router = ROUTER.get()
    own = router.own(url) if router is not None else ""
    if own:
        return await retry_async(
            lambda: _request(own, "post", payload, headers),
            passing=aiohttp.ServerDisconnectedError,
            deadline=Deadline(60.0),
            pauses=Pauses(AGAIN, AGAIN),
            attempts=2,
        )
    return await retry_async(
        lambda: _request(url, action, payload, headers),
        passing=Exception,
        deadline=Deadline(LONGEST),
        pauses=Pauses(AGAIN, AGAIN),
        attempts=max(max_retries, 1),
    )


async def get(url: str) -> Any:
    """The JSON at a URL."""
    router = ROUTER.get()
    return await _request((router.own(url) if router is not None else "") or url, "get", None, None)


def init_http_client(args: Any) -> None:
    """Nothing: there is a client whenever one is needed."""


async def _request(url: str, action: str, payload: Any, headers: Mapping[str, str] | None) -> Any:
    loop = asyncio.get_running_loop()
    if loop not in _sessions or _sessions[loop].closed:
        _sessions[loop] = client_session()
    body = {} if action == "get" else {"json": {} if payload is None else payload}
    async with _sessions[loop].request(action, url, headers=headers, **body) as answer:
        if answer.status >= 400:
            raise RequestRefused(url, answer.status, await answer.text())
        try:
            return await answer.json(content_type=None)
        except ValueError:
            return await answer.text()
