"""What the trainer waits for: between two questions, and once the run is to stop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.trainer import rollout_calls
from hpcrl.trainer.rollout_calls import SOON, TURN, RolloutCalls, StopAsked
from hpcrl.transport.client import Late
from hpcrl.transport.messages import UNFINISHED


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> RolloutCalls:
    """A rollout process that has not finished twice, and then has; the run is to stop."""
    monkeypatch.setattr(rollout_calls, "broadcast_json", lambda value, group: value)
    answers = iter([{UNFINISHED: {}}, {UNFINISHED: {}}, {"held": {"accuracy": 1.0}}])
    client: Any = SimpleNamespace(stop_seen="stop", call=lambda *_, **__: next(answers))
    return RolloutCalls(client, Options(), True, None, lambda: False)


def test_an_evaluation_is_waited_for(calls: RolloutCalls) -> None:
    """One that a resumed run makes again is answered at once; of the others the engines still make the responses."""
    assert calls.wait("evaluate") == {"held": {"accuracy": 1.0}}


def test_samples_are_not(calls: RolloutCalls) -> None:
    with pytest.raises(StopAsked):
        calls.wait("generate")


def test_a_copy_on_its_way_shortens_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is whole, so that a fault in a long rollout costs no step before it; then the turns are long."""
    monkeypatch.setattr(rollout_calls, "least", lambda value, group: value)
    waits, copies = [], iter([True, True, False, False])

    def fetch(rollout_id: int, seconds: float) -> str:
        waits.append(seconds)
        if len(waits) < 5:
            raise Late("not yet")
        return "samples"

    client: Any = SimpleNamespace(stop_seen=None, fetch=fetch)
    assert RolloutCalls(client, Options(), True, None, lambda: next(copies)).fetch(0) == "samples"
    assert waits == [SOON, SOON, SOON, TURN, TURN]
