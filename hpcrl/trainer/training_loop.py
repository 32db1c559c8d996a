"""The training loop of one policy on one rank; rank 0 drives it.

    generate -> train -> publish weights -> save -> evaluate

With --loop async and fully-async the next rollout is requested before this one is trained on (`loop_schedule.py`).
With --colocate the checkpoint is saved before the weights are published: after that the engines have the GPUs.

Invariants: all ranks take the same branch at every step, because the answers that rank 0 gets from the queue, and what
it sees of a request to stop, are shared before any rank acts on them; a stop waits for no other role; the policy
version grows by one with each optimizer step; what is saved is always the state between two rollouts; a resumed run
first makes up for an evaluation that is due.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from hpcrl.errors import HpcrlError
from hpcrl.report.timeline import spans
from hpcrl.run.role import say
from hpcrl.run.summary import Summary, write_summary

if TYPE_CHECKING:
    from hpcrl.trainer.checkpoint.save_load import Position
    from hpcrl.trainer.rank import TrainerRank
    from hpcrl.transport.share_format import Share

T = TypeVar("T")


class TrainingLoop:
    """Of one attempt.

    Attributes:
        log: of its metrics, on the driver alone.
        between: whether the model is what `at` says, as it is between two rollouts.
    """

    def __init__(self, rank: TrainerRank) -> None:
        from hpcrl.report.metrics import MetricsLog
        from hpcrl.trainer.checkpoint import save_load
        from hpcrl.trainer.checkpoint.from_memory import restore_newest
        from hpcrl.trainer.checkpoint.memory_copies import open_copies
        from hpcrl.trainer.checkpoint.saver import Saver
        from hpcrl.trainer.reference_and_critic import ReferenceAndCritic
        from hpcrl.trainer.rollout_calls import RolloutCalls

        self.rank = rank
        self.hooks = rank.hooks
        self.context = context = rank.context
        self.options = context.options
        self.policy = policy = rank.policy
        self.ranks = rank.ranks
        self.driver = rank.driver
        self.timeline = rank.timeline
        self.gpu_sharing = rank.gpu_sharing
        self.checkpoints = Path(context.options.save) if context.options.save else context.rundir.checkpoints
        save_load.writable(self.checkpoints)
        with self.timeline.span(spans.READ):
            self.at, source = restore_newest(context, policy, self.ranks, self.checkpoints)
        self.saved = self.saving = self.at.version  # of the newest checkpoint, and of the one that is being written
        self.on_disk: Position | None = None  # what this attempt has saved last, and waited for
        resumed = save_load.step(self.checkpoints, self.at.rollout_id) if self.at.rollout_id else None
        with self.timeline.span(spans.OTHERS):
            self.others = ReferenceAndCritic(policy, self.ranks, context.options, resumed, source)
        also = lambda staging: self.others.save(self.at.rollout_id, self.at.version, staging)  # noqa: E731
        self.saver = Saver(policy, self.ranks, self.checkpoints, context.plan.run_id, context.options, also)
        self.copies = open_copies(context, policy, self.ranks, also)
        self.client = rank.queue_client()
        self.rollout = RolloutCalls(self.client, self.options, self.driver, rank.patient, self._serve)
        if self.gpu_sharing:
            self.gpu_sharing.use([policy, *self.others.trained_too], self.client if self.driver else None)
        self.log = MetricsLog(context.rundir) if self.driver else None
        self.stopping = False
        self.between = True
        self.waited = 0.0  # seconds of this step
        self.asked = -1  # the last rollout that was requested
        self.published = 0  # the policy version that the engines have
        self.weights = self.at.version  # the policy version of the weights that this rank holds

    def start_rollouts(self) -> None:
        """Tell the rollout process where the run starts or resumes."""
        from hpcrl.trainer.evaluations import EvaluationSchedule
        from hpcrl.trainer.megatron.model import know_length

        started = self.rollout.call("start_run", rollout_id=self.at.rollout_id, state=self.at.data)
        self.total: int = started["num_rollout"]
        know_length(self.policy.scheduler, self.options, self.total)
        self.others.know_length(self.total)
        asking = (self.rollout.call, self.rollout.wait, self.log, self.rank.together, self.timeline)
        self.evaluations = EvaluationSchedule(self.options, self.total, *asking)
        if self.log:
            self.log.truncate(self.at.rollout_id)

    # ---- the loop

    @property
    def more(self) -> bool:
        """Whether there are rollouts to train on."""
        return self.at.rollout_id < self.total

    def start(self) -> None:
        """Give the engines the weights, and have these evaluated if that is due."""
        self._publish()
        if self.options.runs_ahead:
            self._generate(self.at.rollout_id)
        if self.evaluations.owed(self.at.rollout_id):
            self._evaluate(self.at.rollout_id - 1)

    def stop(self, error: BaseException) -> None:
        """The run is asked to stop.

        Raises:
            HpcrlError: if a step was under way that cannot be brought to its end.
        """
        if not self.between:
            raise HpcrlError(
                "rollout-0 gave no sign of life once the run was asked to stop, and did not tell where its data "
                "stands: the step is lost",
                "the last checkpoint is good",
            ) from error
        self.stopping = True

    def keep(self) -> None:
        """Save what has changed."""
        if self.total and self.on_disk is not self.at:  # what was only evaluated has not changed
            self._save()

    def end_rollouts(self) -> None:
        """Log the evaluations that are due, and let the rollout process end."""
        from hpcrl.trainer.rollout_calls import StopAsked

        try:
            self.evaluations.finish()
        except StopAsked:  # a resumed run makes up for it
            self.stopping = True
        with contextlib.suppress(StopAsked):
            self.rollout.call("finish", rollout_id=self.at.rollout_id)
        self.copies.finish()

    def finish(self, seconds: float) -> None:
        """Close the log, and write down how far this attempt has come in so many seconds."""
        status = "stopped" if self.stopping else "finished"
        last = Summary(status, self.context.rundir.attempt, self.at.rollout_id, self.total, self.at.version, seconds)
        if self.log:
            self.log.close()
            write_summary(self.context.rundir.root, last)

    def step(self) -> None:
        """One rollout and its optimizer steps.  StopAsked before it, if the run is to stop."""
        from hpcrl.trainer.loop_schedule import publishes, settles
        from hpcrl.trainer.rollout_calls import StopAsked
        from hpcrl.trainer.step.speed import of_step

        rollout_id = self.at.rollout_id
        begun, at = time.monotonic(), self.timeline.now()
        self.waited = 0.0
        self._generate(rollout_id)
        fetched = self.rollout.fetch(rollout_id)
        if self.gpu_sharing:
            self.gpu_sharing.take_gpus()
        share = self.rank.shares.exchange(fetched)
        self.copies.advance()
        self.waited += time.monotonic() - begun
        self.timeline.add(spans.WAIT, at, self.timeline.now(), rollout_id=rollout_id)
        if self.options.runs_ahead:
            self._generate(rollout_id + 1)
        metrics, steps = self._train(share)
        publishing = bool(steps) and publishes(self.options, rollout_id, self.evaluations.due(rollout_id))
        settle = settles(self.options, publishing)
        self.weights += steps
        snapshot = partial(self.rollout.wait, "snapshot", rollout_id=rollout_id, saved=self.saved, settle=settle)
        data = self._waiting(snapshot) if settle else snapshot()
        self.at = replace(self.at, rollout_id=rollout_id + 1, version=self.at.version + steps, data=data)
        self.between = True
        metrics = share.metrics | metrics | (self._publish() if publishing and not self.gpu_sharing else {})
        if self.options.runs_ahead:
            with contextlib.suppress(StopAsked):  # the next fetch ends the run, once this step is logged
                self._waiting(self._generate, rollout_id + 2)
        self.copies.settle(self.at.rollout_id)
        metrics |= of_step(self.options, share, time.monotonic() - begun, self.waited)
        self.timeline.add(spans.STEP, at, self.timeline.now(), rollout_id=rollout_id)
        if self.log:
            self.log.append(rollout_id, metrics | {"policy_version": self.at.version} | self.copies.spent())
        if path := self.saver.poll():
            self.saved = self.saving
            self.timeline.mark(spans.SAVED, rollout_id=int(path.name.removeprefix("iter_")))
            if self.driver:
                say(f"saved {path}")
        self._save_if_due()
        if self.gpu_sharing:
            self._give_back(rollout_id)
        self.evaluations.log_if_done()
        if self.evaluations.due(rollout_id):
            self._evaluate(rollout_id)

    def _train(self, share: Share) -> tuple[dict[str, float], int]:
        """Learn from this rank's samples of the next rollout: metrics, and how many optimizer steps the policy took."""
        from hpcrl.trainer.loop_schedule import check_staleness
        from hpcrl.trainer.step import train_batch
        from hpcrl.trainer.step.sums import record_samples

        rollout_id, version = self.at.rollout_id, self.at.version
        check_staleness(share, version, self.options.staleness_bound)
        others = self.others.of_share(share.version, version)
        record = partial(record_samples, self.context.rundir.root, self.options, self.ranks)
        trains = self.timeline.now()
        self.between = False
        metrics = train_batch.train(self.policy, self.ranks, self.options, share, others, record, self.hooks, version)
        self.timeline.add(spans.LOGPROBS, trains, trains + int(1e6 * metrics["perf/train_preparation_time"]))
        self.timeline.add(spans.TRAIN, trains, self.timeline.now(), rollout_id=rollout_id)
        self.copies.advance()
        self.others.trained(rollout_id + 1)
        return metrics, train_batch.policy_steps(self.options, share)

    def _evaluate(self, rollout_id: int) -> None:
        if self.options.eval_interval is not None and self.context.plan.engine_count:
            self.evaluations.request_evaluation(rollout_id, self.at.version)

    def _serve(self) -> bool:
        """Send weights to engines that have come back; whether a copy in memory is on its way still."""
        if self.rank.engines:
            self.rank.engines.join(self.weights)
        return not self.gpu_sharing and self.copies.advance()

    def _waiting(self, ask: Callable[..., T], *args: object) -> T:
        """Ask for what is answered once samples exist: the time counts as waiting for them."""
        begun = time.monotonic()
        at = self.timeline.now()
        answer = ask(*args)
        self.waited += time.monotonic() - begun
        self.timeline.add(spans.WAIT, at, self.timeline.now())
        return answer

    def _generate(self, rollout_id: int) -> None:
        """Request the samples of a rollout, if it is one of the run's and was not requested before."""
        from hpcrl.trainer.loop_schedule import steps_of

        if not self.asked < rollout_id < self.total:
            return
        consumed = self.at.version + sum(
            steps_of(self.options, between) for between in range(self.at.rollout_id, rollout_id)
        )
        self.rollout.wait("generate", rollout_id=rollout_id, version=self.published, consumed=consumed)
        self.asked = rollout_id

    def _due(self, interval: int | None) -> bool:
        return bool(interval) and self.at.rollout_id % interval == 0

    def _publish(self) -> dict[str, float]:
        """Send the current weights to every engine; with --colocate the engines then have the GPUs."""
        return self.gpu_sharing.give_back(self._send_weights) if self.gpu_sharing else self._send_weights()

    def _give_back(self, rollout_id: int) -> None:
        """Give the GPUs to the engines, once nothing more is to be done with the state that is on them."""
        metrics = self._publish()
        if self.log:
            self.log.append(rollout_id, metrics | {"perf/hand_over_time": self.gpu_sharing.seconds})

    def _send_weights(self) -> dict[str, float]:
        with self.timeline.span(spans.UPDATE, version=self.at.version):
            metrics = self.rank.engines.publish(self.at.version) if self.rank.engines else {}
            if "perf/update_weights_pause_time" in metrics:
                now = self.timeline.now()
                self.timeline.add(spans.PAUSED, now - int(1e6 * metrics["perf/update_weights_pause_time"]), now)
        self.others.published(self.at.version)
        self.published = self.at.version
        return metrics

    def _save_if_due(self) -> None:
        """Save on disk, or else in memory, what is due after this rollout; in both where the disk comes later."""
        saves = self._due(self.options.save_interval) or self.at.rollout_id == self.total
        if saves:
            self._save()
        if not saves or self.saver.pending:
            self.copies.begin_if_due(self.at)

    def _save(self) -> None:
        """Save; the last time, and before an early end, wait until it is done."""
        if self.gpu_sharing:
            self.gpu_sharing.take_gpus()
        last = self.at.rollout_id == self.total or self.stopping
        begun = time.monotonic()
        with self.timeline.span(spans.SAVE, rollout_id=self.at.rollout_id):
            path = self.saver.save(self.at, wait=last)
        if not self.saver.pending:
            self.on_disk = self.at
            self.timeline.mark(spans.SAVED, rollout_id=self.at.rollout_id)
        self.saved, self.saving = self.saving if self.saver.pending else self.at.version, self.at.version
        if self.log:
            self.log.append(self.at.rollout_id - 1, {"perf/save_time": time.monotonic() - begun})
        if self.driver:
            say(f"{'saving' if self.saver.pending else 'saved'} {path}")
