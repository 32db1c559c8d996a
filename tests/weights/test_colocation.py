"""The order of events on shared GPUs: whatever is tried in whatever order, nobody is there out of turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.weights.colocation import (
    EnginesHold,
    Event,
    HandOver,
    Holding,
    OutOfTurn,
    TrainerHolds,
    after,
    answers,
    follow,
)

ROUND = [Event.TAKE, Event.SHRINK, Event.WAKE_WEIGHTS, Event.UPDATED, Event.LEAVE, Event.WAKE]


def allowed(at: Holding) -> Iterator[tuple[Event, Holding]]:
    for event in Event:
        try:
            yield event, follow(at, event)
        except OutOfTurn:
            continue


def reachable(most: int = 2) -> set[Holding]:
    """Every state with at most `most` requests under way."""
    found, new = {Holding()}, [Holding()]
    while new:
        for _, there in allowed(new.pop()):
            if there not in found and there.requests <= most:
                found.add(there)
                new.append(there)
    return found


def holds(at: Holding) -> None:
    """What must be true in every state."""
    if at.trainer == TrainerHolds.ALL:
        assert at.engines == EnginesHold.ASLEEP
    if at.engines in (EnginesHold.AWAKE, EnginesHold.STARTING):
        assert at.trainer == TrainerHolds.AWAY
    if at.requests:
        assert at.engines == EnginesHold.AWAKE and at.trainer == TrainerHolds.AWAY and at.current
    if at.trainer != TrainerHolds.AWAY:
        assert not answers(at) and not at.requests


@given(st.lists(st.tuples(st.sampled_from(Event), st.integers(0, 3)), max_size=60))
def test_whatever_is_tried_nobody_is_there_out_of_turn(tries: list[tuple[Event, int]]) -> None:
    role = HandOver("a role")
    asleep_since_take = True
    sent = 0
    for event, count in tries:
        before = role.at
        try:
            role.tell(event, count)
        except OutOfTurn as error:
            assert role.at == before, "what is refused changes nothing"
            assert "a role" in str(error) and event in str(error)
            continue
        holds(role.at)
        sent += {Event.SEND: count, Event.ANSWER: -count}.get(event, 0)
        assert role.at.requests == sent >= 0
        if event == Event.TAKE:
            asleep_since_take = False
        if event == Event.UPDATED:
            asleep_since_take = True
        if event == Event.SEND:
            assert asleep_since_take, "the trainer has trained, and its weights have not come"


def test_one_way_out_of_every_state() -> None:
    """No state is a dead end, and beside requests there is but one thing that may happen next."""
    states = reachable()
    assert len(states) == 11
    for at in states:
        holds(at)
        turns = [event for event, _ in allowed(at) if event not in (Event.SEND, Event.ANSWER)]
        repeated = [event for event in turns if event != Event.UPDATED or not at.current]
        assert len(repeated) == (0 if at.requests else 1), (at, turns)
    for at in states:
        for _ in range(20):
            if answers(at):
                break
            at = next(there for event, there in allowed(at) if there != at)
        assert answers(at)


def test_a_round_is_what_the_page_says() -> None:
    at = after(Event.UP, Event.SLEEP, *ROUND)
    assert answers(at)
    for _ in range(3):
        at = follow(follow(at, Event.SEND, 5), Event.ANSWER, 5)
        for event in (Event.SLEEP, *ROUND):
            at = follow(at, event)
    assert answers(at)


@pytest.mark.parametrize(
    ("told", "refused"),
    [
        ([Event.UP], Event.SEND),  # the weights of the checkpoint are not the trainer's
        ([Event.UP], Event.TAKE),
        ([Event.UP, Event.SLEEP], Event.WAKE),
        ([Event.UP, Event.SLEEP], Event.WAKE_WEIGHTS),
        ([Event.UP, Event.SLEEP, Event.TAKE], Event.WAKE_WEIGHTS),
        ([Event.UP, Event.SLEEP, Event.TAKE], Event.SEND),
        ([Event.UP, Event.SLEEP, *ROUND[:3]], Event.LEAVE),  # without an update
        ([Event.UP, Event.SLEEP, *ROUND[:4]], Event.WAKE),  # the trainer's weights are still there
        ([Event.UP, Event.SLEEP, *ROUND, Event.SEND], Event.SLEEP),
    ],
)
def test_out_of_turn_is_refused_by_name(told: list[Event], refused: Event) -> None:
    role = HandOver("engine-3", after(*told))
    with pytest.raises(OutOfTurn, match=f"engine-3: {refused} is out of turn:.*on the GPUs"):
        role.tell(refused)
