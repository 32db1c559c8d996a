"""A conversation with an engine over its OpenAI-compatible endpoint, answers as they are sampled.

Invariants: what is remembered is what was said, a cut answer included; every wait has a deadline.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

from hpcrl.engines.http import Address, reason
from hpcrl.errors import PeerError

MODEL = "policy"  #: what engines call theirs
SECONDS = 300.0  #: that the next piece of an answer may take

Message = dict[str, str]


class Chat:
    """What was said so far.

    Args:
        settings: of the sampling, as the endpoint takes them.
    """

    def __init__(self, settings: dict[str, Any], system: str | None = None) -> None:
        self._settings = settings
        self._system = system
        self.messages: list[Message] = []
        self.forget()

    def forget(self) -> None:
        """Begin again."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def say(self, text: str, address: Address) -> Iterator[str]:
        """The pieces of the answer, as they come.

        Raises:
            PeerError: if the engine refuses, or stops in the middle; then nothing of it is remembered.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        whole = False
        try:
            for piece in _stream({"messages": asked, **self._settings}, address):
                pieces.append(piece)
                yield piece
            whole = True
        finally:  # Ctrl-C cuts an answer, and the conversation continues with what there is of it
            if pieces or whole:
                self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def _stream(body: dict[str, Any], address: Address) -> Iterator[str]:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=SECONDS)
    headers = {"Authorization": f"Bearer {address.key}", "Content-Type": "application/json"}
    try:
        body = {"model": MODEL, "stream": True, **body}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise PeerError(f"the engine answered {answer.status}: {reason(answer.read())}")
        yield from _pieces(answer)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PeerError(f"the engine broke off: {error}", "its log says more") from error
    finally:
        connection.close()


def _pieces(answer: http.client.HTTPResponse) -> Iterator[str]:
    """The text of server-sent events (HTML standard, 9.2), as OpenAI's API has them."""
    for line in answer:
        kind, _, data = line.decode("utf-8", errors="replace").strip().partition(": ")
        if kind != "data":
            continue
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise PeerError(f"the engine stopped: {event['error']}")
        for choice in event.get("choices", ()):
            if piece := (choice.get("delta") or {}).get("content"):
                yield piece
