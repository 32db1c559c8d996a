"""What the trainer asks of evaluations, with this test in the rollout process's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcrl.config.options import Options
from hpcrl.report.metrics import MetricsLog, read_metrics
from hpcrl.report.timeline.spans import Timeline
from hpcrl.run.rundir import RunDir
from hpcrl.trainer.loop_watchers import EvaluationSchedule
from hpcrl.transport.messages import UNFINISHED
from tests.support.options import GRPO


class Rollout:
    """Answers, once it is `done`."""

    def __init__(self) -> None:
        self.done = False
        self.asked: list[dict[str, Any]] = []
        self.waited: list[int] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        assert method == "evaluate"
        self.asked.append(params)
        return {"held": {"accuracy": 0.5, "policy_version": params["version"]}} if self.done else {UNFINISHED: {}}

    def wait(self, method: str, **params: Any) -> dict[str, Any]:
        self.waited.append(params["rollout_id"])
        self.done = True
        return self.call(method, **params)


@pytest.fixture
def log(tmp_path: Path) -> MetricsLog:
    return MetricsLog(RunDir.create(tmp_path / "run"))


def evaluations(rollout: Rollout, log: MetricsLog, **values: Any) -> EvaluationSchedule:
    options = Options(**(GRPO | {"loop": "fully-async", "eval_interval": 2} | values))
    asking: Any = (rollout, log, lambda value: value, Timeline(None))
    return EvaluationSchedule(options, 5, *asking)


def logged(log: MetricsLog) -> list[tuple[int, float]]:
    return [(row["rollout_id"], row["eval/held/policy_version"]) for row in read_metrics(log.path)]


def test_training_overlaps_an_evaluation(log: MetricsLog) -> None:
    """Training overlaps an evaluation and waits for the one before."""
    mine, rollout = evaluations(rollout := Rollout(), log), rollout
    mine.request_evaluation(-1, 0)
    assert not rollout.waited and rollout.asked == [
        {"rollout_id": -1, "version": 0, "while_training": True, "patience": 0.0}
    ]
    mine.log_if_done()
    assert not logged(log)
    rollout.done = True
    mine.log_if_done()
    mine.log_if_done()
    assert logged(log) == [(-1, 0)] and len(rollout.asked) == 3, "nobody asks for what is there"
    rollout.done = False
    mine.request_evaluation(1, 2)
    mine.request_evaluation(3, 4)
    assert rollout.waited == [1] and logged(log) == [(-1, 0), (1, 2), (3, 4)]
    rollout.done = False
    mine.request_evaluation(4, 5)
    assert rollout.waited == [1, 4], "after the last rollout there is nothing to go on with"
    assert [mine.due(rollout_id) for rollout_id in range(5)] == [False, True, False, True, True]


def test_the_loops_that_take_turns_or_repeat_wait(log: MetricsLog) -> None:
    for values in ({"loop": "sync"}, {"loop": "async", "deterministic_mode": True}):
        rollout = Rollout()
        evaluations(rollout, log, **values).request_evaluation(1, 2)
        assert rollout.waited == [1] and "while_training" not in rollout.asked[0]


def test_resume_makes_up_for_missing(log: MetricsLog) -> None:
    """A resumed run makes up for evaluations that are not logged."""
    beside = evaluations(Rollout(), log)
    turns = evaluations(Rollout(), log, loop="sync")
    assert beside.owed(0) and turns.owed(0)
    assert beside.owed(1), "the one before the first step went on beside it"
    assert [turns.owed(trained) for trained in (1, 2, 3)] == [False, True, False]
    log.append(-1, {"eval/held/accuracy": 0.5})
    assert [beside.owed(trained) for trained in (1, 2, 3, 5)] == [False, True, True, True]
    log.append(2, {"eval/held/accuracy": 0.5})  # made up for the one after rollout 1
    assert [beside.owed(trained) for trained in (2, 3, 4, 5)] == [False, False, True, True]
    assert not evaluations(Rollout(), log, skip_eval_before_train=True).owed(1)
