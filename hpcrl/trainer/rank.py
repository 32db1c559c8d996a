"""What one trainer rank has, whatever it trains: its place among the ranks, the models, the checkpoints, and the way to
queue and engines.

    rank = TrainerRank(context, timeline)
    rank.open_engines()                      # once the rollout process is there
    rank.ready(...)
    rank.send_weights(version)
    rank.leave()
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpcrl.config.plugin_points import load_points
from hpcrl.report.timeline import spans
from hpcrl.report.timeline.spans import Timeline
from hpcrl.run.peers import TrainerPeer, publish
from hpcrl.run.role import RoleContext, say
from hpcrl.trainer.checkpoint import save_load
from hpcrl.trainer.checkpoint.from_memory import restore_newest
from hpcrl.trainer.checkpoint.memory_copies import open_copies
from hpcrl.trainer.checkpoint.saver import Saver
from hpcrl.trainer.collectives import broadcast_json, make_patient
from hpcrl.trainer.custom_hooks import TrainerHooks
from hpcrl.trainer.gpu_sharing import GpuSharing
from hpcrl.trainer.megatron import model, running_parts
from hpcrl.trainer.megatron.model import Policy
from hpcrl.trainer.parallel_state import initialize, seed_rank
from hpcrl.trainer.reference_and_critic import ReferenceAndCritic
from hpcrl.trainer.rollout_calls import ShareExchange
from hpcrl.trainer.start.rendezvous import connect
from hpcrl.trainer.step.speed import card_of, device_name
from hpcrl.trainer.weight_export import WeightExporter, sent_part
from hpcrl.transport.auth import http_key
from hpcrl.transport.client import QueueClient
from hpcrl.utils.installed import versions
from hpcrl.weights.sender import WeightSender
from hpcrl.weights.updates import FirstUpdate, Updates

SILENCE = 0.25  #: of --stop-timeout, that the rollout process may be silent in a run that is to stop


class TrainerRank:
    """Of one attempt.

    Attributes:
        start: how far the run was when this attempt began.
        others: models in addition to the policy.
        client: of the queue; None if this rank fetches nothing.
        updates: of the engines' weights; None without engines, and before `open_engines`.
    """

    def __init__(self, context: RoleContext, timeline: Timeline) -> None:
        timeline.imported()
        self.context = context
        self.options = options = context.options
        self.timeline = timeline
        self.store = connect(context)
        self.gpu_sharing = GpuSharing(context) if options.takes_turns else None  # before any rank touches a GPU
        self.hooks = TrainerHooks(options, load_points(options, "trainer"))
        with timeline.span(spans.MEET):
            self.ranks = initialize(options, self.store)
        self.driver = self.ranks.rank == 0
        self.hooks.initialized()
        self.patient = make_patient(options)
        if self.gpu_sharing:
            self.gpu_sharing.start(self.driver, self.barrier)
        self.policy = self._build()
        self.shares = ShareExchange(self.ranks, options.distributed_timeout_minutes)
        self._open_checkpoints(Path(options.save) if options.save else context.rundir.checkpoints)
        self.client = None
        if self.shares.fetches:
            patience = options.rollout_timeout, options.stop_timeout * SILENCE
            place = self.ranks.dp_rank, self.ranks.dp_size
            self.client = QueueClient(context.rundir, context.plan, *place, *patience)
        if self.gpu_sharing:
            trained = [self.policy, *self.others.trained_too]
            self.gpu_sharing.use(trained, self.client if self.driver else None)
        self.updates: Updates | None = None

    def _build(self) -> Policy:
        """The model; rank 0 says what it runs with, and before that which hosts differ in what they build it of.

        What training draws begins with the seed, however many numbers the building has drawn.
        """
        versions = running_parts.exchange_versions(self.store, self.context.plan, self.ranks.rank)
        if warning := running_parts.differing(versions):
            say(warning)
        with self.timeline.span(spans.BUILD):
            policy = model.build(self.options, self.ranks)
        seed_rank(self.options.seed, self.ranks)
        if self.driver:
            say(running_parts.line(policy, versions))
        return policy

    def _open_checkpoints(self, directory: Path) -> None:
        """Take up the weights that the attempt begins with, and what saves those that it makes."""
        context, options, policy, ranks = self.context, self.options, self.policy, self.ranks
        save_load.writable(directory)
        with self.timeline.span(spans.READ):
            self.start, source = restore_newest(context, policy, ranks, directory)
        resumed = save_load.step(directory, self.start.rollout_id) if self.start.rollout_id else None
        with self.timeline.span(spans.OTHERS):
            self.others = ReferenceAndCritic(policy, ranks, options, resumed, source)
        self.saver = Saver(policy, ranks, directory, context.plan.run_id, options, self.others.save)
        self.copies = open_copies(context, policy, ranks, self.others.save)

    def open_engines(self) -> None:
        """Wait for the engines, if there are any."""
        if not self.context.plan.engine_count:
            return
        context, options, policy = self.context, self.options, self.policy
        host, own = context.plan.trainers[0].at, context.plan.trainers[self.ranks.rank].at
        identity = context.plan.run_id.partition("/")[0]  # the stage's name is in its directory's
        sent = sent_part(policy, options)
        self.exporter = WeightExporter(sent, self.patient, own, options.hf_checkpoint, options.refreshes_drafts)
        sender = WeightSender(context.rundir, host, options, self.driver, self.hooks.weights_written, identity)
        first = None
        if sent.of_adapters:  # the weights under it go once
            under = WeightExporter(policy, self.patient, own, options.hf_checkpoint)
            base = WeightSender(context.rundir, host, options, self.driver, None, f"base-of-{identity}", base=True)
            first = FirstUpdate(base, under.stream, under.leave)
        asking = self.client if self.driver else None, partial(http_key, context.rundir), self.together
        self.updates = Updates(sender, context.rundir, options.engine_start_timeout, *asking, first)
        with self.timeline.span(spans.ENGINES):
            self.updates.wait()

    def ready(self, start: int, total: int) -> None:
        """All ranks are about to train: after `start` of `total` rollouts."""
        if self.driver:
            card, name = card_of(self.ranks.device), device_name(self.ranks.device)
            about = {"device": name, "tflops": card.tflops if card else 0.0, "versions": versions()}
            publish(self.context.rundir, TrainerPeer(start=start, total=total, **about))
        self.barrier()
        self.timeline.started()
        self.timeline.mark(spans.READY, rollout_id=start)

    def send_weights(self, version: int) -> dict[str, float]:
        """Put the policy into all engines, if there are any: metrics, on the driver."""
        with self.timeline.span(spans.UPDATE, version=version):
            metrics = self.updates.publish(self.exporter.stream, version) if self.updates else {}
            if "perf/update_weights_pause_time" in metrics:
                now = self.timeline.now()
                self.timeline.add(spans.PAUSED, now - int(1e6 * metrics["perf/update_weights_pause_time"]), now)
        self.others.published(version)
        return metrics

    def send_to_returned(self, version: int) -> None:
        """Put it into the engines that have come back and wait for it, if there are any."""
        if self.updates:
            self.updates.join(self.exporter.stream, version)

    def leave(self) -> None:
        """Complete the copy in memory that is on its way, and give up what sends weights."""
        self.copies.finish()
        if self.updates:
            self.exporter.leave()
            if self.driver:
                self.updates.close()

    def together(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        return broadcast_json(value, group=self.patient)

    def barrier(self) -> None:
        """Wait for all ranks, as long as any of them may have to wait for other roles."""
        dist.barrier(group=self.patient)
