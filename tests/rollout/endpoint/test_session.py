"""What a session keeps of a response's turns."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from hpcrl.rollout.endpoint.session import ResponseContext, Session
from hpcrl.rollout.engines.completion import Completion, Sampling
from hpcrl.utils.sample_parts import COMPLETED


class Client:
    """Answers two tokens, the number of the request and 9; the first request last."""

    def __init__(self) -> None:
        self.count = 0
        self.versions = [0, 0]

    async def complete(self, *given: Any) -> Completion:
        self.count += 1
        said = np.asarray([self.count, 9], np.int32)
        if self.count == 1:
            await asyncio.sleep(0)
        return Completion(said, np.zeros(2, np.float32), np.asarray(self.versions, np.int32), COMPLETED)


class Tokens:
    """A tokenizer."""

    vocab_size = 100000

    def decode(self, *given: Any) -> str:
        return ""


def a_session() -> Session:
    making = ResponseContext(Sampling(1.0, 40, (), (9,)), ("train",), 0)
    return Session(making, Client(), Tokens(), lambda: None)  # type: ignore[arg-type]


def test_every_turn_stays_known() -> None:
    """A conversation takes memory for each of its tokens once."""
    session, asked = a_session(), [[1, 2, 3]]

    async def run() -> None:
        for turn in range(60):
            found = await session.sample_turn(asked[-1], {})
            await session.sample_turn([7, 7, turn], {})
            asked.append([*asked[-1], *found.tokens.tolist(), 50 + turn, *range(20)])

    asyncio.run(run())
    assert [turn.tokens.tolist() for turn in session.turns[::2]] == asked[:-1]
    histories = {turn.history for turn in session.turns}
    assert len(histories) == 61 and sum(len(history.tokens) for history in histories) < len(asked[-1]) + 60 * 6


def test_turns_are_in_the_order_of_requests() -> None:
    """Whichever is answered first; a rewritten request leaves the turns before as they were."""
    session = a_session()

    async def run() -> None:
        await asyncio.gather(session.sample_turn([1, 2, 3], {}), session.sample_turn([1, 2, 4], {}))
        await session.sample_turn([1, 2, 4, 2, 8], {})

    asyncio.run(run())
    assert [turn.tokens.tolist() for turn in session.turns] == [[1, 2, 3], [1, 2, 4], [1, 2, 4, 2, 8]]
    assert [turn.answer.tokens.tolist() for turn in session.turns] == [[1, 9], [2, 9], [3, 9]]


def test_an_update_under_a_turn_ends_nothing() -> None:
    """Turns whose tokens are of several policies, as engines go on under new weights: the conversation goes on too."""
    session = a_session()
    session.client = client = Client()  # type: ignore[assignment]

    async def run() -> None:
        tokens = [1, 2, 3]
        for version in range(5):  # more updates than a batch has rollouts
            client.versions = [version, version + 1]
            turn = await session.sample_turn(tokens, {})
            assert turn.versions.tolist() == [version, version + 1]
            tokens = [*tokens, *turn.tokens.tolist(), 50]

    asyncio.run(run())
    assert not session.ended and len(session.turns) == 5 and len({turn.history for turn in session.turns}) == 1
