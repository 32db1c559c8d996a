"""When the trainer has its weights evaluated, whether it waits for the result, and where the numbers go.

Invariants: every rank takes the same branch, as all of them get rank 0's answers; one evaluation of a policy runs at a
time, so the next one that is due waits for it; the last one of a run is waited for; a resumed run makes up for one that
was due and is not logged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcrl.config.options import Options
from hpcrl.report.metrics import MetricsLog
from hpcrl.report.timeline.spans import EVALUATE, Timeline
from hpcrl.trainer.loop_schedule import evaluates_beside, last_evaluation
from hpcrl.transport.messages import UNFINISHED

#: asks the rollout process; every rank gets the answer
Ask = Callable[..., dict[str, Any]]


class EvaluationSchedule:
    """The evaluations of one attempt.

    Attributes:
        total: rollouts of the run.
        ask: calls the rollout process, which answers at once.
        wait: the same, repeated until there is a result.
        log: of rank 0 alone.
        together: broadcasts rank 0's value to every rank.
        timeline: this rank's.
    """

    def __init__(
        self,
        options: Options,
        total: int,
        ask: Ask,
        wait: Ask,
        log: MetricsLog | None,
        together: Callable[[Any], Any],
        timeline: Timeline,
    ) -> None:
        self._options = options
        self._total = total
        self._ask = ask
        self._wait = wait
        self._log = log
        self._together = together
        self._timeline = timeline
        self._beside = evaluates_beside(options)
        self._open: dict[str, Any] | None = None  # the evaluation that runs meanwhile, as it is asked for

    def due(self, rollout_id: int) -> bool:
        """Whether the weights after `rollout_id` are to be evaluated."""
        return last_evaluation(self._options, rollout_id, self._total) == rollout_id

    def owed(self, trained: int) -> bool:
        """Whether the weights after `trained` rollouts, with which this attempt begins, are to be evaluated before
        anything else."""
        if trained == 0:
            return not self._options.skip_eval_before_train
        last = last_evaluation(self._options, trained - 1, self._total)
        if last != trained - 1 and not self._beside:  # an earlier one was waited for
            return False
        done = self._together(self._log.evaluated(last) if self._log else None)
        return not done and (last >= 0 or not self._options.skip_eval_before_train)

    def request_evaluation(self, rollout_id: int, version: int) -> None:
        """Have held-out accuracy measured, and logged with the rollout that it follows (-1: before the first)."""
        self.settle()
        asked = {"rollout_id": rollout_id, "version": version}
        if self._beside and rollout_id + 1 < self._total:
            self._open = asked | {"while_training": True}
            self.log_if_done()
            return
        with self._timeline.span(EVALUATE, rollout_id=rollout_id):
            self._append(rollout_id, self._wait("evaluate", **asked))

    def log_if_done(self) -> None:
        """Log the evaluation that runs meanwhile, if it is done."""
        if self._open is not None:
            self._log_results(self._open, self._ask("evaluate", **self._open, patience=0.0))

    def settle(self) -> None:
        """Wait for the evaluation that runs meanwhile."""
        if self._open is not None:
            with self._timeline.span(EVALUATE, rollout_id=self._open["rollout_id"]):
                self._log_results(self._open, self._wait("evaluate", **self._open))

    def finish(self) -> None:
        """Nothing more is trained: log what is done, and wait for what the end of the run waits for."""
        self.log_if_done()

    def _log_results(self, asked: dict[str, Any], results: dict[str, Any]) -> None:
        if UNFINISHED not in results:
            self._open = None
            self._append(asked["rollout_id"], results)

    def _append(self, rollout_id: int, results: dict[str, Any]) -> None:
        if self._log and results:  # none if the run was asked to stop meanwhile
            rows = {f"eval/{name}/{key}": value for name, row in results.items() for key, value in row.items()}
            self._log.append(rollout_id, rows)
