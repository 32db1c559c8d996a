"""What a trainer rank sends to engines: all weights, or the weights under an adapter once, then the adapter.

Invariant: every rank makes the same of the same options, since each export is collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpcrl.run.role import RoleContext
from hpcrl.trainer.megatron.model import Policy
from hpcrl.trainer.weight_export import WeightExporter, sent_part
from hpcrl.transport.auth import http_key
from hpcrl.weights.disk import Written
from hpcrl.weights.sender import WeightSender
from hpcrl.weights.updates import FirstUpdate, Updates

if TYPE_CHECKING:
    from hpcrl.transport.client import QueueClient


@dataclass
class EngineUpdates:
    """The updates of an attempt, on one rank.

    Attributes:
        exporter: of what is in the model.
    """

    updates: Updates
    exporter: WeightExporter

    def wait(self) -> None:
        """See `Updates.wait`."""
        self.updates.wait()

    def publish(self, version: int) -> dict[str, float]:
        """Put the policy into all engines; `Updates.publish`."""
        return self.updates.publish(self.exporter.stream, version)

    def join(self, version: int) -> None:
        """The same for engines that wait for weights, if there are any."""
        self.updates.join(self.exporter.stream, version)

    def leave(self, driver: bool) -> None:
        """Give up groups and memory."""
        self.exporter.leave()
        if driver:
            self.updates.close()


def make_updates(
    context: RoleContext,
    policy: Policy,
    patient: dist.ProcessGroup,
    written: Written,
    client: QueueClient | None,
    together: Callable[[Any], Any],
) -> EngineUpdates:
    """What exports the weights of this rank, and what directs their updates.

    Args:
        patient: a gloo group of all ranks.
        written: see `WeightSender`.
        client: of the queue, on rank 0 alone.
        together: broadcasts rank 0's value to every rank.
    """
    options, rundir = context.options, context.rundir
    host = context.plan.trainers[0].at
    identity = context.plan.run_id.partition("/")[0]  # the stage's name is in its directory's
    driver = policy.ranks.rank == 0
    own = context.plan.trainers[policy.ranks.rank].at
    sent = sent_part(policy, options)
    exporter = WeightExporter(sent, patient, own, options.hf_checkpoint, options.refreshes_drafts)
    sender = WeightSender(rundir, host, options, driver, written, identity)
    first: FirstUpdate | None = None
    if sent.of_adapters:
        under = WeightExporter(policy, patient, own, options.hf_checkpoint)
        base = WeightSender(rundir, host, options, driver, None, f"base-of-{identity}", base=True)
        first = FirstUpdate(base, under.stream, under.leave)
    start = options.engine_start_timeout
    updates = Updates(sender, rundir, start, client, partial(http_key, rundir), together, first)
    return EngineUpdates(updates, exporter)
