"""What the training loop tells its watchers by `observe`, and two of them.

LoopReport writes the timeline and, on rank 0, metrics and log.  EvaluationSchedule says when weights are evaluated,
whether training waits for the result, and where the numbers go.  The third is `checkpoint/memory_copies.py`.

Invariants: every rank takes the same branch, as all of them get rank 0's answers; one evaluation of a policy runs at a
time, so the next one that is due waits for it; the last one of a run is waited for; a resumed run makes up for one that
was due and is not logged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcrl.config.options import Options
from hpcrl.report.metrics import MetricsLog
from hpcrl.report.timeline import spans
from hpcrl.run.role import RoleContext, say
from hpcrl.trainer.loop_schedule import evaluates_beside, last_evaluation, steps_of
from hpcrl.trainer.rollout_calls import RolloutCalls
from hpcrl.trainer.step.speed import card_of, of_step, reached
from hpcrl.transport.messages import UNFINISHED
from hpcrl.transport.share_format import Share

if TYPE_CHECKING:
    from hpcrl.trainer.checkpoint.save_load import Position
    from hpcrl.trainer.megatron.model import Policy

#: waited: for samples of a later rollout; stepped: the rollout is over, its weights published (not with --colocate);
#: saving: a checkpoint is being written; rested: what is due is saved; handed over: GPUs and weights, to the engines
Done = Literal["fetched", "waited", "trained", "stepped", "saving", "saved", "rested", "handed over"]


@dataclass(frozen=True)
class LoopEvent:
    """Something that the loop has done.

    Attributes:
        at: how far the run is.
        begin, end: microseconds by the timeline; 0 to `end`: it is not known how long it took.
        share: what a step was trained on.
        path: of a checkpoint.
        on_disk: whether the state is.
    """

    done: Done
    at: Position
    rollout_id: int
    begin: int
    end: int
    metrics: dict[str, float] = field(default_factory=dict)
    share: Share | None = None
    path: Path | None = None
    on_disk: bool = False


class LoopReport:
    """Writes down what the loop does.

    Attributes:
        log: of the metrics, on the driver alone.
    """

    def __init__(
        self, context: RoleContext, timeline: spans.Timeline, driver: bool, start: int, policy: Policy
    ) -> None:
        self._options = context.options
        self._policy = policy
        self._timeline = timeline
        self._waited = 0  # microseconds of this step
        self.log = MetricsLog(context.rundir) if driver else None
        if self.log:
            self.log.truncate(start)

    def observe(self, event: LoopEvent) -> None:
        """Write it down; what other watchers have spent on it counts as part of a wait, and of a step."""
        begin, now, which = event.begin, self._timeline.now(), {"rollout_id": event.rollout_id}
        match event.done:
            case "fetched" | "waited":
                self._waited += now - begin
                self._timeline.add(spans.WAIT, begin, now, **(which if event.done == "fetched" else {}))
            case "trained":
                prepared = begin + int(1e6 * event.metrics["perf/train_preparation_time"])
                self._timeline.add(spans.LOGPROBS, begin, prepared)
                self._timeline.add(spans.TRAIN, begin, event.end, **which)
            case "stepped":
                speed = of_step(self._options, event.share, (now - begin) / 1e6, self._waited / 1e6)
                took, trained = event.metrics["perf/train_time"], steps_of(self._options, event.rollout_id) > 0
                speed |= reached(
                    self._policy, self._options, event.share, took, trained, card_of(self._policy.ranks.device)
                )
                self._waited = 0
                self._timeline.add(spans.STEP, begin, now, **which)
                self._append(event.rollout_id, event.metrics | speed | {"policy_version": event.at.version})
            case "saving" | "saved":
                if event.done == "saved":
                    self._timeline.mark(spans.SAVED, **which)
                if begin:
                    self._append(event.rollout_id - 1, {"perf/save_time": (event.end - begin) / 1e6})
                if self.log:
                    say(f"{event.done} {event.path}")
            case "handed over":
                self._append(event.rollout_id, event.metrics)

    def _append(self, rollout_id: int, metrics: dict[str, float]) -> None:
        if self.log:
            self.log.append(rollout_id, metrics)


@dataclass
class EvaluationSchedule:
    """The evaluations of one attempt.

    Attributes:
        total: rollouts of the run.
        log: of rank 0 alone.
        together: broadcasts rank 0's value to every rank.
        timeline: this rank's.
        open: the evaluation that runs meanwhile, as it is asked for.
    """

    options: Options
    total: int
    rollout: RolloutCalls
    log: MetricsLog | None
    together: Callable[[Any], Any]
    timeline: spans.Timeline
    open: dict[str, Any] | None = None

    def due(self, rollout_id: int) -> bool:
        """Whether the weights after `rollout_id` are to be evaluated."""
        return last_evaluation(self.options, rollout_id, self.total) == rollout_id

    def owed(self, trained: int) -> bool:
        """Whether the weights after `trained` rollouts, with which this attempt begins, are to be evaluated before
        anything else."""
        if trained == 0:
            return not self.options.skip_eval_before_train
        last = last_evaluation(self.options, trained - 1, self.total)
        if last != trained - 1 and not evaluates_beside(self.options):  # an earlier one was waited for
            return False
        done = self.together(self.log.evaluated(last) if self.log else None)
        return not done and (last >= 0 or not self.options.skip_eval_before_train)

    def observe(self, event: LoopEvent) -> None:
        """Log the evaluation that runs meanwhile, if it is done after a step."""
        if event.done == "rested":
            self.log_if_done()

    def request_evaluation(self, rollout_id: int, version: int) -> None:
        """Have held-out accuracy measured, and logged with the rollout that it follows (-1: before the first)."""
        if self.open is not None:
            self._wait(self.open)
        asked = {"rollout_id": rollout_id, "version": version}
        if evaluates_beside(self.options) and rollout_id + 1 < self.total:
            self.open = asked | {"while_training": True}
            self.log_if_done()
        else:
            self._wait(asked)

    def log_if_done(self) -> None:
        """Log the evaluation that runs meanwhile, if it is done."""
        if self.open is not None:
            self._log_results(self.open, self.rollout.call("evaluate", **self.open, patience=0.0))

    def _wait(self, asked: dict[str, Any]) -> None:
        with self.timeline.span(spans.EVALUATE, rollout_id=asked["rollout_id"]):
            self._log_results(asked, self.rollout.wait("evaluate", **asked))

    def _log_results(self, asked: dict[str, Any], results: dict[str, Any]) -> None:
        if UNFINISHED in results:
            return
        self.open = None
        if self.log and results:  # none if the run was asked to stop meanwhile
            rows = {f"eval/{name}/{key}": value for name, row in results.items() for key, value in row.items()}
            self.log.append(asked["rollout_id"], rows)
