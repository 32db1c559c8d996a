"""What the calls of the training loop (`training_loop.py`) do, and how far it is.

Invariants: every call is collective; the watchers observe it once it is done, on every rank alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from hpcrl.errors import HpcrlError
from hpcrl.report.timeline import spans
from hpcrl.run.summary import Summary, write_summary
from hpcrl.trainer.checkpoint.save_load import Position
from hpcrl.trainer.loop_schedule import check_staleness, steps_of
from hpcrl.trainer.loop_watchers import Done, EvaluationSchedule, LoopEvent, LoopReport
from hpcrl.trainer.megatron.model import know_length
from hpcrl.trainer.rank import TrainerRank
from hpcrl.trainer.rollout_calls import RolloutCalls, StopAsked
from hpcrl.trainer.step import train_batch
from hpcrl.trainer.step.sums import record_samples
from hpcrl.transport.share_format import Share


class LoopCalls:
    """Of one attempt.

    Attributes:
        at: rollouts and optimizer steps that are done.
        total: rollouts of the run.
        between: whether the model is what `at` says, as it is between two rollouts.
        held: the policy version of the weights that this rank holds.
        published: that of the engines' weights.
        requested: the last rollout that was requested.
    """

    def __init__(self, rank: TrainerRank) -> None:
        self.rank, self.options, self.at = rank, rank.options, rank.start
        self.between, self.stopping = True, False
        self.held, self.published, self.requested = self.at.version, 0, -1
        self.rollout = RolloutCalls(rank.client, rank.options, rank.driver, rank.patient, self._serve)
        started = self.rollout.call("start_run", rollout_id=self.at.rollout_id, state=self.at.data)
        self.total: int = started["num_rollout"]
        know_length(rank.policy.scheduler, rank.options, self.total)
        rank.others.know_length(self.total)
        self.report = LoopReport(rank.context, rank.timeline, rank.driver, self.at.rollout_id, rank.policy)
        asking = (self.rollout, self.report.log, rank.together, rank.timeline)
        self.evaluations = EvaluationSchedule(rank.options, self.total, *asking)
        rank.open_engines()
        rank.ready(self.at.rollout_id, self.total)

    def observe(self, done: Done, rollout_id: int = -1, begin: int = 0, **more: Any) -> None:
        """Tell the watchers what was done."""
        event = LoopEvent(done, self.at, rollout_id, begin, self.rank.timeline.now(), **more)
        for watcher in (self.rank.copies, self.report, self.evaluations):
            watcher.observe(event)

    def generate(self, rollout_id: int) -> None:
        """Request the samples of a rollout, if it is one of the run's and was not requested before."""
        if self.requested < rollout_id < self.total:
            ahead = sum(steps_of(self.options, before) for before in range(self.at.rollout_id, rollout_id))
            versions = {"version": self.published, "consumed": self.at.version + ahead}
            self.rollout.wait("generate", rollout_id=rollout_id, **versions)
            self.requested = rollout_id

    def fetch(self, rollout_id: int) -> Share:
        """This rank's samples of a rollout, once every rank has its own."""
        fetched = self.rollout.fetch(rollout_id)
        if self.rank.gpu_sharing:
            self.rank.gpu_sharing.take_gpus()
        return self.rank.shares.exchange(fetched)

    def train(self, share: Share) -> dict[str, float]:
        """Learn from this rank's samples of a rollout: metrics."""
        rank, version = self.rank, self.at.version
        check_staleness(share, version, self.options.staleness_bound)
        others = rank.others.of_share(share.version, version)
        record = partial(record_samples, rank.context.rundir.root, self.options, rank.ranks)
        begin = rank.timeline.now()
        self.between = False
        metrics = train_batch.train(rank.policy, rank.ranks, self.options, share, others, record, rank.hooks, version)
        self.held += train_batch.policy_steps(self.options, share)
        self.observe("trained", share.rollout_id, begin, metrics=metrics)
        rank.others.trained(share.rollout_id + 1)
        return metrics

    def end_rollout(self, rollout_id: int, settle: bool) -> None:
        """Learn from the rollout process what a run needs that resumes after this rollout.

        Args:
            settle: once the rollout that is sampled ahead is whole.
        """
        saved = (self.rank.saver.saved or self.rank.start).version
        with self.waiting() if settle else contextlib.nullcontext():
            data = self.rollout.wait("snapshot", rollout_id=rollout_id, saved=saved, settle=settle)
        self.at = Position(rollout_id + 1, self.held, data)
        self.between = True

    def publish_weights(self) -> dict[str, float]:
        """Send the current weights to every engine: metrics; with --colocate the engines then have the GPUs."""
        send = partial(self.rank.send_weights, self.at.version)
        metrics = self.rank.gpu_sharing.give_back(send) if self.rank.gpu_sharing else send()
        self.published = self.at.version
        return metrics

    def save_if_due(self) -> None:
        """Save what is due, once a checkpoint that was written meanwhile has its name."""
        saver = self.rank.saver
        if path := saver.poll():
            self.observe("saved", saver.saved.rollout_id, path=path)
        interval = self.options.save_interval
        due = self.at.rollout_id == self.total or (bool(interval) and self.at.rollout_id % interval == 0)
        if due:
            self.save()
        self.observe("rested", self.at.rollout_id, on_disk=due and not saver.pending)

    def save(self) -> None:
        """Save; the last time, and before an early end, wait until it is done."""
        saver, timeline = self.rank.saver, self.rank.timeline
        if self.rank.gpu_sharing:
            self.rank.gpu_sharing.take_gpus()
        begin = timeline.now()
        with timeline.span(spans.SAVE, rollout_id=self.at.rollout_id):
            path = saver.save(self.at, wait=self.stopping or self.at.rollout_id == self.total)
        self.observe("saving" if saver.pending else "saved", self.at.rollout_id, begin, path=path)

    def evaluate(self, rollout_id: int) -> None:
        """Have the current weights evaluated, after this rollout."""
        if self.options.eval_interval is not None and self.rank.context.plan.engine_count:
            self.evaluations.request_evaluation(rollout_id, self.at.version)

    def stop(self, error: BaseException) -> None:
        """The run is asked to stop.

        Raises:
            HpcrlError: if a step was under way that cannot be brought to its end.
        """
        if not self.between:
            raise HpcrlError(
                "rollout-0 did not answer after the run was asked to stop, and did not save the position of its data: "
                "the step is lost",
                "the last checkpoint is good",
            ) from error
        self.stopping = True

    def finish(self, begin: int) -> None:
        """Log the evaluations that are due, let the rollout process end, and write down how far this attempt has come.

        Args:
            begin: of the first rollout.
        """
        try:
            self.evaluations.log_if_done()
        except StopAsked:  # a resumed run makes up for it
            self.stopping = True
        with contextlib.suppress(StopAsked):
            self.rollout.call("finish", rollout_id=self.at.rollout_id)
        self.rank.leave()
        status = "stopped" if self.stopping else "finished"
        seconds = (self.rank.timeline.now() - begin) / spans.SECOND
        if self.report.log:
            self.report.log.close()
            rundir, at = self.rank.context.rundir, self.at
            write_summary(rundir.root, Summary(status, rundir.attempt, at.rollout_id, self.total, at.version, seconds))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within, the trainer waits for samples."""
        begin = self.rank.timeline.now()
        yield
        self.observe("waited", begin=begin)

    def _serve(self) -> bool:
        """Send weights to engines that have come back; whether a copy in memory is on its way still."""
        self.rank.send_to_returned(self.held)
        return not self.rank.gpu_sharing and self.rank.copies.advance()
