"""One trainer rank; rank 0 drives the loop of the whole run.

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
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hpcrl.errors import HpcrlError
from hpcrl.report.timeline import spans
from hpcrl.report.timeline.spans import Timeline, trainer_timeline
from hpcrl.run.peers import publish
from hpcrl.run.process import die_with_parent, exit_after
from hpcrl.run.role import RoleContext, act, open_role, say
from hpcrl.run.summary import Summary, write_summary
from hpcrl.toolbox.imports import without_collection

if TYPE_CHECKING:
    from hpcrl.trainer.checkpoint.save_load import Position
    from hpcrl.trainer.megatron.model import Policy
    from hpcrl.weights.updates import Updates

T = TypeVar("T")
#: seconds to hold back an error that may only mean that another rank is gone: that rank's own error is to be recorded
#: first, or its launcher's, which waits 3 s for a more telling one
ECHO = 6.0
SILENCE = 0.25  #: of --stop-timeout, that the rollout process may be silent in a run that is to stop


class Trainer:
    """The training loop of one rank."""

    def __init__(self, context: RoleContext, timeline: Timeline) -> None:
        from hpcrl.config.plugin_points import load_points
        from hpcrl.queue.client import QueueClient
        from hpcrl.report.metrics import MetricsLog
        from hpcrl.trainer.checkpoint import save_load
        from hpcrl.trainer.checkpoint.from_memory import restore_newest
        from hpcrl.trainer.checkpoint.memory_copies import open_copies
        from hpcrl.trainer.checkpoint.saver import Saver
        from hpcrl.trainer.collectives import make_patient
        from hpcrl.trainer.custom_hooks import TrainerHooks
        from hpcrl.trainer.gpu_sharing import GpuSharing
        from hpcrl.trainer.parallel_state import initialize, verify_groups
        from hpcrl.trainer.reference_and_critic import ReferenceAndCritic
        from hpcrl.trainer.rollout_calls import RolloutCalls
        from hpcrl.trainer.start.rendezvous import connect
        from hpcrl.trainer.step.share_exchange import ShareExchange

        timeline.imported()
        self.context = context
        self.options = context.options
        self.timeline = timeline
        self.store = connect(context)
        self.gpu_sharing = GpuSharing(context) if context.options.takes_turns else None  # before any rank touches a GPU
        self.hooks = TrainerHooks(context.options, load_points(context.options, "trainer"))
        with timeline.span(spans.MEET):
            self.ranks = initialize(context.options, self.store)
        self.hooks.initialized()
        verify_groups(context.options, self.ranks.rank)
        self.patient = make_patient(context.options)
        if self.gpu_sharing:
            self.gpu_sharing.begin(self.driver, self._together)
        self.policy = self._build()
        self.checkpoints = Path(context.options.save) if context.options.save else context.rundir.checkpoints
        save_load.writable(self.checkpoints)
        with timeline.span(spans.READ):
            self.at, source = restore_newest(context, self.policy, self.ranks, self.checkpoints)
        self.saved = self.saving = self.at.version  # of the newest checkpoint, and of the one that is being written
        self.on_disk: Position | None = None  # what this attempt has saved last, and waited for
        resumed = save_load.step(self.checkpoints, self.at.rollout_id) if self.at.rollout_id else None
        with timeline.span(spans.OTHERS):
            self.others = ReferenceAndCritic(self.policy, self.ranks, context.options, resumed, source)
        also = lambda staging: self.others.save(self.at.rollout_id, self.at.version, staging)  # noqa: E731
        self.saver = Saver(self.policy, self.ranks, self.checkpoints, context.plan.run_id, context.options, also)
        self.copies = open_copies(context, self.policy, self.ranks, also)
        self.shares = ShareExchange(self.ranks, context.options.distributed_timeout_minutes)
        patience = self.options.rollout_timeout, self.options.stop_timeout * SILENCE
        args = (context.rundir, context.plan, self.ranks.dp_rank, self.ranks.dp_size, *patience)
        self.client = QueueClient(*args) if self.shares.fetches else None
        self.updates: Updates | None = None
        self.rollout = RolloutCalls(self.client, self.options, self.driver, self.patient, self._serve)
        if self.gpu_sharing:
            self.gpu_sharing.use([self.policy, *self.others.trained_too], self.client if self.driver else None)
        self.log = MetricsLog(context.rundir) if self.driver else None
        self.stopping = False
        self.between = True  # whether the model is what `at` says, as it is between two rollouts
        self.waited = 0.0  # seconds of this step
        self.asked = -1  # the last rollout that was requested
        self.published = 0  # the policy version that the engines have
        self.weights = self.at.version  # the policy version of the weights that this rank holds
        self._begin()

    def _build(self) -> Policy:
        """The model; rank 0 says what it runs with, and before that which hosts differ in what they build it of."""
        from hpcrl.peer_proof.gloo_groups import protection
        from hpcrl.trainer.megatron import model, running_parts

        versions = running_parts.exchange_versions(self.store, self.context.plan, self.ranks.rank)
        if warning := running_parts.differing(versions):
            say(warning)
        with self.timeline.span(spans.BUILD):
            policy = model.build(self.options, self.ranks)
        if self.driver:
            say(running_parts.line(running_parts.running_parts(policy, versions)))
            say(protection(self.ranks.device.type))
        return policy

    def _begin(self) -> None:
        """Tell the rollout process where the run starts or resumes, and wait for the engines: the run is ready then."""
        from hpcrl.peer_proof.gloo_groups import check_groups
        from hpcrl.trainer.collectives import broadcast_json
        from hpcrl.trainer.evaluations import EvaluationSchedule
        from hpcrl.trainer.megatron.model import know_length
        from hpcrl.trainer.step.speed import ready_peer

        check_groups()
        self.total = self.rollout.ask("begin", rollout_id=self.at.rollout_id, state=self.at.data)["num_rollout"]
        know_length(self.policy.scheduler, self.options, self.total)
        self.others.know_length(self.total)
        together = partial(broadcast_json, group=self.patient)
        asking = (self.rollout.ask, self.rollout.wait, self.log, together, self.timeline)
        self.evaluations = EvaluationSchedule(self.options, self.total, *asking)
        self.updates = self._updates(together) if self.context.plan.engine_count else None
        if self.updates:
            with self.timeline.span(spans.ENGINES):
                self.updates.wait()
        if self.driver:
            self.log.truncate(self.at.rollout_id)
            publish(self.context.rundir, ready_peer(self.ranks.device, self.at.rollout_id, self.total))
        self._together()
        self.timeline.started()
        self.timeline.mark(spans.READY, rollout_id=self.at.rollout_id)

    def _updates(self, together: Callable[[Any], Any]) -> Updates:
        """What sends weights to engines."""
        from hpcrl.trainer.engine_updates import make_updates

        client = self.client if self.driver else None
        written = self.hooks.weights_written
        self.exporter, updates = make_updates(self.context, self.policy, self.patient, written, client, together)
        return updates

    @property
    def driver(self) -> bool:
        return self.ranks.rank == 0

    # ---- the loop

    def run(self) -> None:
        from hpcrl.trainer.rollout_calls import StopAsked

        started = time.monotonic()
        status: Literal["finished", "stopped"] = "finished"
        try:
            self._loop()
        except StopAsked as error:
            if not self.between:
                raise HpcrlError(
                    "rollout-0 gave no sign of life once the run was asked to stop, and did not tell where its data "
                    "stands: the step is lost",
                    "the last checkpoint is good",
                ) from error
            self.stopping = True
            status = "stopped"
        if self.total and self.on_disk is not self.at:  # what was only evaluated has not changed
            self._save()
        with contextlib.suppress(StopAsked):
            self.evaluations.look()
        with contextlib.suppress(StopAsked):
            self.rollout.ask("finish", rollout_id=self.at.rollout_id)
        self._finish(status, started)

    def _loop(self) -> None:
        self._publish()
        if self.options.runs_ahead:
            self._generate(self.at.rollout_id)
        if self.evaluations.owed(self.at.rollout_id):
            self._evaluate(self.at.rollout_id - 1)
        while self.at.rollout_id < self.total:
            self._step()

    def _step(self) -> None:
        """One rollout and its optimizer steps.  StopAsked before it, if the run is to stop."""
        from hpcrl.trainer.loop_schedule import check_staleness, publishes, settles
        from hpcrl.trainer.rollout_calls import StopAsked
        from hpcrl.trainer.step import train_batch
        from hpcrl.trainer.step.speed import of_step
        from hpcrl.trainer.step.sums import record_samples

        rollout_id = self.at.rollout_id
        begun, at = time.monotonic(), self.timeline.now()
        self.waited = 0.0
        self._generate(rollout_id)
        fetched = self.rollout.fetch(rollout_id)
        if self.gpu_sharing:
            self.gpu_sharing.take()
        share = self.shares.exchange(fetched)
        self.copies.look()
        self.waited += time.monotonic() - begun
        self.timeline.add(spans.WAIT, at, self.timeline.now(), rollout_id=rollout_id)
        if self.options.runs_ahead:
            self._generate(rollout_id + 1)
        check_staleness(share, self.at.version, self.options.staleness_bound)
        others = self.others.of_share(share.version, self.at.version)
        record = partial(record_samples, self.context.rundir.root, self.options, self.ranks)
        trains = self.timeline.now()
        version = self.at.version
        self.between = False
        metrics = train_batch.train(self.policy, self.ranks, self.options, share, others, record, self.hooks, version)
        self.timeline.add(spans.LOGPROBS, trains, trains + int(1e6 * metrics["perf/train_preparation_time"]))
        self.timeline.add(spans.TRAIN, trains, self.timeline.now(), rollout_id=rollout_id)
        self.copies.look()
        self.others.trained(rollout_id + 1)
        steps = train_batch.policy_steps(self.options, share)
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
        self.evaluations.look()
        if self.evaluations.due(rollout_id):
            self._evaluate(rollout_id)

    def _evaluate(self, rollout_id: int) -> None:
        if self.options.eval_interval is not None and self.context.plan.engine_count:
            self.evaluations.begin(rollout_id, self.at.version)

    def _serve(self) -> bool:
        """Send weights to engines that have joined or come back; whether a copy in memory is on its way still."""
        if self.updates:
            self.updates.join(self.exporter.stream, self.weights)
        return not self.gpu_sharing and self.copies.look()

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
            metrics = self.updates.publish(self.exporter.stream, self.at.version) if self.updates else {}
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
            self.gpu_sharing.take()
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

    def _finish(self, status: Literal["finished", "stopped"], started: float) -> None:
        self.copies.finish()
        if self.updates:
            self.exporter.leave()
        if self.driver:
            self.log.close()
            self.updates and self.updates.close()
            rundir = self.context.rundir
            seconds = time.monotonic() - started
            last = Summary(status, rundir.attempt, self.at.rollout_id, self.total, self.at.version, seconds)
            write_summary(rundir.root, last)

    def _together(self) -> None:
        """Wait for all ranks, as long as any of them may have to wait for other roles."""
        import torch.distributed as dist

        dist.barrier(group=self.patient)


def main() -> int:
    die_with_parent(forks=True)
    return work(open_role(), int(os.environ.get("RANK", "0")))


def work(context: RoleContext, rank: int) -> int:
    """Be trainer rank `rank` to the end of the run; the exit status."""

    def late(error: BaseException) -> float:
        from hpcrl.trainer.collectives import may_be_echo

        return ECHO if may_be_echo(error) else 0.0

    def body() -> None:
        with without_collection():
            from hpcrl.trainer.megatron import cpu_shim

            cpu_shim.install()
        timeline = trainer_timeline(context.rundir, context.plan, rank)
        Trainer(context, timeline).run()
        timeline.close()

    return act("trainer", context, rank, body, late)


if __name__ == "__main__":
    exit_after(main)
