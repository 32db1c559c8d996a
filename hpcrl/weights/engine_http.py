"""Small HTTP calls to an engine, with the key of the run.

Every call has a connection of its own: vLLM closes a kept one after an error, and a stale one looks like a dead engine.
Invariants: every call has a deadline; the key is in the header alone and in no message.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from typing import Any

from hpcrl.errors import PeerError

TURN = "/hpcrl/turn"  #: where an engine that shares its GPUs is told whose turn it is
CORE = "/hpcrl/core"  #: whether the engine core works (GET): 200, also while it makes what it was asked to, or LATE
LATE = 504  #: its status when the core has been at a call for longer than whoever asked for that call waits
PATIENCE = "Hpcrl-Patience"  #: header: how many seconds who sends a request waits for the answer
LONGEST = 600  #: characters of an answer that go into an error


@dataclass(frozen=True)
class Address:
    """Where an engine listens, and the key that it requires."""

    host: str
    port: int
    key: str = field(repr=False)


class HttpError(PeerError):
    """No answer (status None: refused, reset or too late) or one that is not 200."""

    def __init__(self, what: str, status: int | None) -> None:
        super().__init__(what)
        self.status = status


def ask(address: Address, method: str, path: str, seconds: float, body: Any = None) -> Any:
    """The JSON of a 200 answer; None if it is empty.

    seconds: limit of each wait on the socket.  HttpError says what came instead.
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
        raise HttpError(f"{where} answered {answer.status}: {_reason(text)}", answer.status)
    try:
        return json.loads(text) if text.strip() else None
    except ValueError:
        return None  # such as /metrics


def _reason(text: bytes) -> str:
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
