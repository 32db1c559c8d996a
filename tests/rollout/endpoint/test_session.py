"""What a session keeps of a response's turns."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from hpcrl.rollout.endpoint import session as module
from hpcrl.rollout.endpoint.session import ResponseContext, Session
from hpcrl.rollout.engines.completion import Completion
from hpcrl.rollout.engines.sampling import Sampling
from hpcrl.rollout.prompts.prompt_files import Prompt
from hpcrl.sample import COMPLETED


class Client:
    """Answers two tokens, the number of the request and 9; the first request last."""

    def __init__(self) -> None:
        self.count = 0

    async def complete(self, *given: Any) -> Completion:
        self.count += 1
        said = np.asarray([self.count, 9], np.int32)
        if self.count == 1:
            await asyncio.sleep(0)
        return Completion(said, np.zeros(2, np.float32), np.zeros(2, np.int32), COMPLETED)


class Tokens:
    """A tokenizer."""

    vocab_size = 100000

    def decode(self, *given: Any) -> str:
        return ""


def a_session() -> Session:
    making = ResponseContext(Sampling(1.0, 40, (), (9,)), ("train",), 0)
    return Session(making, Client(), Tokens(), lambda: None)  # type: ignore[arg-type]


def test_every_turn_stays_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above KEPT only resuming is given up; a conversation takes memory for each of its tokens once."""
    monkeypatch.setattr(module, "KEPT", 1000)
    session, asked = a_session(), [[1, 2, 3]]

    async def run() -> None:
        for turn in range(60):
            found = await session.ask(asked[-1], {})
            if turn == 5:
                assert len(session.samples(Prompt(1, "", np.zeros(0, np.int32)), 0, 0)) == 11
            await session.ask([7, 7, turn], {})
            asked.append([*asked[-1], *found.tokens.tolist(), 50 + turn, *range(20)])

    asyncio.run(run())
    assert [turn.tokens.tolist() for turn in session.turns[::2]] == asked[:-1]
    assert sum(len(turn.added) for turn in session.turns) < len(asked[-1]) + 60 * 3
    assert session.samples(Prompt(1, "", np.zeros(0, np.int32)), 0, 0) == []


def test_turns_are_in_the_order_of_requests() -> None:
    """Whichever is answered first; a rewritten request has what it shares from the one before."""
    session = a_session()

    async def run() -> None:
        await asyncio.gather(session.ask([1, 2, 3], {}), session.ask([1, 2, 4], {}))
        await session.ask([1, 2, 4, 2, 8], {})

    asyncio.run(run())
    assert [turn.tokens.tolist() for turn in session.turns] == [[1, 2, 3], [1, 2, 4], [1, 2, 4, 2, 8]]
    assert session.turns[2].shared == 4
