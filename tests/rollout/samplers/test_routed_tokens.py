"""The experts of samples that a custom function has returned: of its turns, failures and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrl.models.routing import Routing
from hpcrl.rollout.endpoint import session as sessions
from hpcrl.rollout.endpoint.recorded_turns import choices_of
from hpcrl.rollout.endpoint.session import ResponseContext, Session
from hpcrl.rollout.engines.completion import Sampling
from hpcrl.rollout.grading.service import GradedBy
from hpcrl.rollout.prompts.tokenizer import Tokenizer
from hpcrl.rollout.samplers.sampler import HeldOutSet
from hpcrl.sample import Sample
from hpcrl.transport.share_format import SampleBatch
from tests.rollout.samplers.test_custom import asked, sampler
from tests.support.two_ways import Policy, make_model

pytestmark = pytest.mark.process
ROUTING = Routing(layers=(1,), of=2, experts=200, chosen=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def routed(made: Any) -> Any:
    """A sampler whose policy is one with experts."""
    made._train = replace(made._train, routing=ROUTING)
    return made


def rows(sample: Sample) -> list[tuple[int, int]]:
    """(position, number of the request) that each row names, (0, 0) where it is unknown."""
    column = sample.array("rollout_routed_experts")
    assert column.shape == (len(sample.array("tokens")), 1, 2) and column.dtype == np.uint8
    return [tuple(row) for row in column[:, 0].tolist()]


def expected(sample: Sample, first: int, second: int, turn: int = 3) -> list[tuple[int, int]]:
    """Of two turns: the first request's up to its last token, the second's behind; of the last token none."""
    begin = len(sample.array("tokens")) - sample.response_length
    numbers = [first if at < begin + turn - 1 else second for at in range(len(sample.array("tokens")) - 1)]
    return [*enumerate(numbers), (0, 0)]


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, Any]:
    """What one sampler made, one after another."""

    async def run() -> dict[str, Any]:
        found: dict[str, Any] = {}
        async with sampler(model, "by_label") as (made, policy):
            routed(made)
            for label in ("two_turns", "an_agent", "at_the_engine", "fans_out", "cuts_its_answer"):
                policy.asked = []
                found[label] = await made.make(asked(model, 0 if label == "fans_out" else 1, label=label))
            found["invents"] = await made.make(asked(model, label="invents_tokens"))
            held = HeldOutSet("held", 4, 1, Sampling.from_options(made._options, Tokenizer(model), True), GradedBy(()))
            found["held"] = await made.make(asked(model, label="two_turns", held_out=held))
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("label", ["two_turns", "an_agent"])
def test_each_turn_brings_its_own_rows(found: dict[str, Any], label: str) -> None:
    """The rows of a turn's tokens come from the request that sampled them, whatever the next one chose for them."""
    [sample] = found[label]
    assert rows(sample) == expected(sample, 1, 2)


def test_one_turn_and_several_samples(found: dict[str, Any]) -> None:
    [sample] = found["at_the_engine"]
    assert rows(sample) == [*((at, 1) for at in range(len(sample.tokens) - 1)), (0, 0)]
    for sample in found["fans_out"]:
        assert len({number for _, number in rows(sample)[:-1]}) == 1
    assert len(SampleBatch.from_samples(found["two_turns"] + found["fans_out"] + found["invents"]).extra) == 1


def test_an_answer_of_which_part_was_kept(found: dict[str, Any]) -> None:
    """Two of three tokens, the last of them trained: what came before it is known."""
    [sample] = found["cuts_its_answer"]
    assert sample.response_length == 2 and rows(sample)[-2:] == [(len(sample.tokens) - 2, 1), (0, 0)]


def test_tokens_that_were_not_asked_with(found: dict[str, Any]) -> None:
    """They cost the response, which says so by the function's name; its place is filled with unknown rows."""
    [sample] = found["invents"]
    assert sample.grading == "error" and not any(sample.loss_mask) and not sample.array("rollout_routed_experts").any()
    assert "own_generates.by_label returned other tokens" in sample.grading_error
    assert "--use-rollout-routing-replay" in sample.grading_error


def test_evaluations_bring_none(found: dict[str, Any]) -> None:
    assert not found["held"][0].has("rollout_routed_experts")


def test_a_conversation_keeps_each_row_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has been asked between: memory grows by what a turn adds, and all rows can be put together."""
    monkeypatch.setattr(sessions, "RECENT", 3)
    tokenizer = Tokenizer(model)
    making = ResponseContext(Sampling(1.0, 40, (), (1,), routing=ROUTING), ("train",), 0)
    session = Session(making, Policy(tokenizer), tokenizer, lambda: None)  # type: ignore[arg-type]
    tokens = [2, 3, 4]

    async def run() -> None:
        nonlocal tokens
        for turn in range(30):
            found = await session.sample_turn(tokens, {})
            await session.sample_turn([2, turn % 9], {})
            tokens = [*tokens, *found.tokens.tolist(), 7]

    asyncio.run(run())
    held = sum(history.read for history in {turn.history for turn in session.turns})
    assert held <= len(tokens) + 30 * 4
    found = choices_of(np.asarray(tokens[:-2], np.int32), session.turns)
    assert found is not None and found[:, 0, 0].tolist() == list(range(len(tokens) - 2))
    numbers = found[:, 0, 1].tolist()
    assert numbers == sorted(numbers) and len(set(numbers)) == 30
    assert choices_of(np.asarray([*tokens[:-2], 60], np.int32), session.turns) is None
