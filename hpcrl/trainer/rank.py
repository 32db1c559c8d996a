"""What one trainer rank has, whatever it trains: its place among the ranks, the model, and the way to the engines.

Invariant: nothing heavy is imported before the process knows its place in the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcrl.report.timeline import spans
from hpcrl.report.timeline.spans import Timeline
from hpcrl.run.role import RoleContext, say

if TYPE_CHECKING:
    from hpcrl.trainer.engine_updates import EngineUpdates
    from hpcrl.trainer.megatron.model import Policy
    from hpcrl.transport.client import QueueClient

SILENCE = 0.25  #: of --stop-timeout, that the rollout process may be silent in a run that is to stop


class TrainerRank:
    """Of one attempt.

    Attributes:
        engines: what sends weights to them; None without engines, and before `open_engines`.
    """

    def __init__(self, context: RoleContext, timeline: Timeline) -> None:
        from hpcrl.config.plugin_points import load_points
        from hpcrl.trainer.collectives import make_patient
        from hpcrl.trainer.custom_hooks import TrainerHooks
        from hpcrl.trainer.gpu_sharing import GpuSharing
        from hpcrl.trainer.parallel_state import initialize, verify_groups
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
            self.gpu_sharing.start(self.driver, self.barrier)
        self.policy = self._build()
        self.shares = ShareExchange(self.ranks, context.options.distributed_timeout_minutes)
        self.engines: EngineUpdates | None = None

    def _build(self) -> Policy:
        """The model; rank 0 says what it runs with, and before that which hosts differ in what they build it of.

        What training draws begins with the seed, however many numbers the building has drawn.
        """
        from hpcrl.trainer.megatron import model, running_parts
        from hpcrl.trainer.parallel_state import seed_rank

        versions = running_parts.exchange_versions(self.store, self.context.plan, self.ranks.rank)
        if warning := running_parts.differing(versions):
            say(warning)
        with self.timeline.span(spans.BUILD):
            policy = model.build(self.options, self.ranks)
        seed_rank(self.options.seed, self.ranks)
        if self.driver:
            say(running_parts.line(running_parts.running_parts(policy, versions)))
        return policy

    @property
    def driver(self) -> bool:
        return self.ranks.rank == 0

    def queue_client(self) -> QueueClient | None:
        """Of the rollouts; None if this rank fetches nothing."""
        from hpcrl.transport.client import QueueClient

        if not self.shares.fetches:
            return None
        patience = self.options.rollout_timeout, self.options.stop_timeout * SILENCE
        return QueueClient(self.context.rundir, self.context.plan, self.ranks.dp_rank, self.ranks.dp_size, *patience)

    def open_engines(self, client: QueueClient | None) -> None:
        """Wait for the engines, if there are any.

        Args:
            client: of the queue, on the driver.
        """
        from hpcrl.trainer.engine_updates import make_updates

        if not self.context.plan.engine_count:
            return
        written = self.hooks.weights_written
        asks = client if self.driver else None
        self.engines = make_updates(self.context, self.policy, self.patient, written, asks, self.together)
        with self.timeline.span(spans.ENGINES):
            self.engines.wait()

    def ready(self, start: int, total: int) -> None:
        """All ranks are about to train: after `start` of `total` rollouts."""
        from hpcrl.run.peers import publish
        from hpcrl.trainer.step.speed import ready_peer

        if self.driver:
            publish(self.context.rundir, ready_peer(self.ranks.device, start, total))
        self.barrier()
        self.timeline.started()
        self.timeline.mark(spans.READY, rollout_id=start)

    def leave(self) -> None:
        """Give up what sends weights."""
        if self.engines:
            self.engines.leave(self.driver)

    def together(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        from hpcrl.trainer.collectives import broadcast_json

        return broadcast_json(value, group=self.patient)

    def barrier(self) -> None:
        """Wait for all ranks, as long as any of them may have to wait for other roles."""
        import torch.distributed as dist

        dist.barrier(group=self.patient)
