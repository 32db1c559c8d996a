"""HTTP clients: small calls to an engine with the key of the run, from threads and event loops, and `client_session`.

Every call has its own connection: vLLM closes a kept one after an error, and a stale one looks like a dead engine.
Invariants: every call has a deadline; the key is in the header alone and in no message.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpcrl.errors import PeerError

if TYPE_CHECKING:
    from aiohttp import ClientSession

TURN = "/hpcrl/turn"  #: the route that tells an engine with shared GPUs whose turn it is
#: whether it lives; vLLM answers this also while its core hangs, or is stopped
HEALTH = "/health"
IS_PAUSED = "/is_paused"  #: what only vLLM's core can answer
CORE = "/hpcrl/core"  #: whether the engine core works (GET): 200, also while it makes what it was asked to, or LATE
LATE = 504  #: its status when the core has been at a call for longer than its caller waits
PATIENCE = "Hpcrl-Patience"  #: header: how many seconds who sends a request waits for the answer
HEALTH_SECONDS = 10.0  #: that an engine may take for one of these answers
GLANCE_SECONDS = 5.0  #: where other engines and roles are waited for meanwhile
#: in place of a status: no answer in time, no listener, and a connection that broke
SILENT, REFUSED, BROKEN = -1, 0, -2
_REALM = re.compile(r'Bearer realm="([0-9a-f.]{1,64})"')
CONNECT = 10.0  #: seconds for a TCP connection
LONGEST = 600  #: characters of an answer that go into an error


@dataclass(frozen=True)
class Address:
    """Where an engine listens, and the key that it requires."""

    host: str
    port: int
    key: str = field(repr=False)

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class HttpError(PeerError):
    """No answer (status None: refused, reset or too late) or one that is not 200."""

    def __init__(self, what: str, status: int | None) -> None:
        super().__init__(what)
        self.status = status


def request_json(address: Address, method: str, path: str, seconds: float, body: Any = None) -> Any:
    """The JSON of a 200 answer; None if it is empty.

    Args:
        seconds: limit of each wait on the socket.

    Raises:
        HttpError: says what came instead.
    """
    where = f"{method} {path.partition('?')[0]} at {address.host}:{address.port}"
    connection = http.client.HTTPConnection(address.host, address.port, timeout=seconds)
    headers = {"Authorization": f"Bearer {address.key}", "Content-Type": "application/json", PATIENCE: f"{seconds:g}"}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
    except TimeoutError as error:
        raise HttpError(f"{where}: no answer within {seconds:.0f} s", None) from error
    except (OSError, http.client.HTTPException) as error:
        raise HttpError(f"{where}: {error!r}", None) from error
    finally:
        connection.close()
    if answer.status != 200:
        raise HttpError(f"{where} answered {answer.status}: {reason(text)}", answer.status)
    try:
        return json.loads(text) if text.strip() else None
    except ValueError:
        return None  # such as /metrics


def status(address: Address, path: str = HEALTH, seconds: float = HEALTH_SECONDS) -> int:
    """The status with which the engine answers; else SILENT, REFUSED (one that is ending does not listen) or BROKEN."""
    try:
        request_json(address, "GET", path, seconds)
    except HttpError as error:
        if error.status is not None:
            return error.status
        if isinstance(error.__cause__, TimeoutError):
            return SILENT
        return REFUSED if isinstance(error.__cause__, ConnectionRefusedError) else BROKEN
    return 200


async def answer(address: Address, path: str = HEALTH, seconds: float = HEALTH_SECONDS) -> tuple[int, Any]:
    """The same for an event loop, with the JSON object that came; a connection that broke is REFUSED too."""
    status, _, data = await _get(address, path, seconds, {"Authorization": f"Bearer {address.key}"})
    try:
        return status, json.loads(data) if data[:1] == b"{" else None
    except ValueError:
        return REFUSED, None


async def realm_of(address: Address, seconds: float = HEALTH_SECONDS) -> tuple[int, str]:
    """What an engine answers to who shows no key: (status, the realm that it names, "" for none).

    The status is 200 for a server that anybody may use; SILENT and REFUSED as above.
    """
    status, headers, _ = await _get(address, HEALTH, seconds, {})
    named = _REALM.fullmatch(headers.get("WWW-Authenticate", ""))
    return status, named[1] if named else ""


def client_session(headers: Mapping[str, str] | None = None, connections: int = 0, idle: float = 15.0) -> ClientSession:
    """A client for the event loop that runs; only the time until a connection is there is limited.

    Args:
        connections: the most at one time; 0: no limit.
        idle: seconds for which one is kept open.
    """
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=idle),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def _get(
    address: Address, path: str, seconds: float, headers: Mapping[str, str]
) -> tuple[int, Mapping[str, str], bytes]:
    """(status, headers, body) of an answer; SILENT or REFUSED, and nothing, where none came."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=seconds)
    try:
        async with (
            client_session(headers) as session,
            session.get(f"{address.url}{path}", timeout=timeout) as found,
        ):
            return found.status, found.headers, await found.read()
    except TimeoutError:
        return SILENT, {}, b""
    except (aiohttp.ClientError, OSError, ValueError):
        return REFUSED, {}, b""


def reason(text: bytes) -> str:
    """What an error answer says, in one line."""
    plain = text.decode(errors="replace")
    try:
        found = json.loads(plain)
        inner = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
        plain = inner.get("message", inner) if isinstance(inner, dict) else inner
    except ValueError:
        pass
    line = " ".join(str(plain).split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} ..."
