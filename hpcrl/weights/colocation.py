"""Trainer and engines on the same GPUs (--colocate): who holds them, and in which order they change hands.

    engines' turn      the engines are awake and answer requests; the trainer's state is in host memory
    trainer's turn     the engines sleep; the trainer's state is on the GPUs
    weight update      the trainer has put gradients and optimizer away, the engines have woken their weights alone

    UP -> SLEEP -> TAKE -> SHRINK -> WAKE_WEIGHTS -> UPDATED -> LEAVE -> WAKE -> requests -> SLEEP -> TAKE -> ...

Every role keeps its own copy (`HandOver`), tells it what happens, and refuses what is not its turn.

Invariants: no request while the trainer has anything on the GPUs, or before the engines have its weights; the trainer
takes the GPUs only from sleeping engines, and gives them back only after an update; pure functions of states and
events.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hpcrl.errors import PeerError


class TrainerHolds(StrEnum):
    """What the trainer has on the GPUs."""

    AWAY = "nothing"
    WEIGHTS = "its weights"
    ALL = "all of its state"


class EnginesHold(StrEnum):
    """What the engines have on the GPUs."""

    STARTING = "starting"
    AWAKE = "awake"
    ASLEEP = "asleep"
    WEIGHTS = "awake except for their KV cache"


class Event(StrEnum):
    """What happens, by the name that goes over the wire."""

    UP = "up"  #: the engines have started
    SLEEP = "sleep"  #: the engines give up their memory
    TAKE = "take"  #: the trainer puts its state onto the GPUs
    SHRINK = "shrink"  #: the trainer has put away all but its weights
    WAKE_WEIGHTS = "wake-weights"  #: the engines have memory for their weights again
    UPDATED = "updated"  #: the engines have the trainer's weights
    LEAVE = "leave"  #: the trainer has put away its weights too
    WAKE = "wake"  #: the engines have their KV cache again and answer requests
    SEND = "send"  #: a request goes to an engine
    ANSWER = "answer"  #: one has ended


class Holding(msgspec.Struct, frozen=True):
    """Who has what on the GPUs.

    Attributes:
        current: the engines have the trainer's weights.
        requests: how many are under way.
    """

    engines: EnginesHold = EnginesHold.STARTING
    trainer: TrainerHolds = TrainerHolds.AWAY
    current: bool = False
    requests: int = 0

    def __str__(self) -> str:
        return f"the trainer has {self.trainer} on the GPUs, the engines are {self.engines}"


class OutOfTurn(PeerError):
    """Something that is not allowed while others hold the GPUs."""


def follow(at: Holding, event: Event, count: int = 1) -> Holding:
    """What `event` makes of a state.

    Args:
        count: requests, of SEND and ANSWER. OutOfTurn if it may not happen now.
    """
    engines, trainer = at.engines, at.trainer
    match event:
        case Event.UP if engines == EnginesHold.STARTING:
            return msgspec.structs.replace(at, engines=EnginesHold.AWAKE)
        case Event.SLEEP if engines == EnginesHold.AWAKE and not at.requests:
            return msgspec.structs.replace(at, engines=EnginesHold.ASLEEP, current=False)
        case Event.TAKE if engines == EnginesHold.ASLEEP and trainer == TrainerHolds.AWAY:
            return msgspec.structs.replace(at, trainer=TrainerHolds.ALL)
        case Event.SHRINK if trainer == TrainerHolds.ALL:
            return msgspec.structs.replace(at, trainer=TrainerHolds.WEIGHTS)
        case Event.WAKE_WEIGHTS if engines == EnginesHold.ASLEEP and trainer == TrainerHolds.WEIGHTS:
            return msgspec.structs.replace(at, engines=EnginesHold.WEIGHTS)
        case Event.UPDATED if engines == EnginesHold.WEIGHTS and trainer == TrainerHolds.WEIGHTS:
            return msgspec.structs.replace(at, current=True)
        case Event.LEAVE if trainer == TrainerHolds.WEIGHTS and at.current:
            return msgspec.structs.replace(at, trainer=TrainerHolds.AWAY)
        case Event.WAKE if engines == EnginesHold.WEIGHTS and trainer == TrainerHolds.AWAY:
            return msgspec.structs.replace(at, engines=EnginesHold.AWAKE)
        case Event.SEND if answers(at) and count > 0:
            return msgspec.structs.replace(at, requests=at.requests + count)
        case Event.ANSWER if 0 < count <= at.requests:
            return msgspec.structs.replace(at, requests=at.requests - count)
    busy = f", and {at.requests} requests are under way" if at.requests else ""
    raise OutOfTurn(f"{event} is out of turn: {at}{busy}")


def answers(at: Holding) -> bool:
    """Whether requests may be sent: the engines are awake, with the trainer's weights."""
    return at.engines == EnginesHold.AWAKE and at.current


def after(*events: Event) -> Holding:
    """The state that these events lead to from the start."""
    at = Holding()
    for event in events:
        at = follow(at, event)
    return at


#: engines go to sleep by themselves before they say that they are up
ENGINES_UP = after(Event.UP, Event.SLEEP)
#: where a trainer begins that has found all engines up, and the rollout process when the trainer first calls it
TRAINERS_TURN = after(Event.UP, Event.SLEEP, Event.TAKE)


class HandOver:
    """A role's own copy of the state.

    Attributes:
        who: the role, as an error names it.
    """

    def __init__(self, who: str, at: Holding = Holding()) -> None:  # noqa: B008  (frozen)
        self.who = who
        self.at = at

    def tell(self, event: Event, count: int = 1) -> None:
        """Note what happens.  OutOfTurn, and nothing is changed, if it may not."""
        try:
            self.at = follow(self.at, event, count)
        except OutOfTurn as error:
            raise OutOfTurn(f"{self.who}: {error}") from None

    @property
    def answers(self) -> bool:
        """Whether requests may be sent now."""
        return answers(self.at)
