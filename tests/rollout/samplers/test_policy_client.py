"""What a custom function's client does when its connection to the endpoint ends."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
import pytest

from hpcrl.rollout.samplers.conversation import PolicyClient
from hpcrl.rollout.samplers.trajectory import Turn

TURN = {"tokens": [5], "logprobs": [-0.5], "versions": [1], "finish_reason": "stop", "text": "x"}
BODY = msgspec.json.encode(TURN)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)
RESET, CUT, WHOLE = None, HEAD, HEAD + BODY


def asked(*answers: bytes | None) -> tuple[Turn | Exception, list[bytes]]:
    """What a call comes to when its connections end after these answers, and the requests that the server got."""

    async def main() -> tuple[Turn | Exception, list[bytes]]:
        got: list[bytes] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            got.append(await reader.readuntil(b"}}"))
            said = answers[len(got) - 1]
            if said is RESET:
                writer.transport.abort()
            else:
                writer.write(said)
                await writer.drain()
                writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, aiohttp.ClientSession() as http:
            try:
                return await PolicyClient(f"http://127.0.0.1:{port}", "key", http).generate(
                    [1, 2], {"stop": ["y"]}
                ), got
            except Exception as error:  # noqa: BLE001  (it is what is asked for)
                return error, got

    return asyncio.run(main())


def test_reset_before_the_answer_is_asked_again() -> None:
    """A connection that ends before an answer begins costs nothing: the same is asked once more."""
    turn, got = asked(RESET, WHOLE)
    assert isinstance(turn, Turn) and turn.tokens.tolist() == [5]
    assert len(got) == 2 and got[0] == got[1]


@pytest.mark.parametrize(("answers", "times"), [((RESET, RESET, WHOLE), 2), ((CUT, WHOLE), 1)], ids=["twice", "begun"])
def test_not_asked_without_end(answers: tuple[Any, ...], times: int) -> None:
    """A second end is the call's failure, and so is one in the middle of an answer."""
    found, got = asked(*answers)
    assert isinstance(found, aiohttp.ClientError)
    assert len(got) == times
