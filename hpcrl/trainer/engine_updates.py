"""What a trainer rank sends to engines: all weights, or with adapters the weights under them first, then adapters.

Invariant: every rank makes the same of the same options, since each export is collective.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpcrl.adapters.serving import slots
from hpcrl.adapters.versions import name_of
from hpcrl.queue.auth import client_keys, http_key
from hpcrl.run.role import RoleContext
from hpcrl.trainer.megatron.model import Policy
from hpcrl.trainer.weight_export import WeightExporter, sent_part
from hpcrl.weights.disk import Written
from hpcrl.weights.sender import WeightSender
from hpcrl.weights.updates import FirstUpdate, Updates

if TYPE_CHECKING:
    from hpcrl.queue.client import QueueClient


@dataclass
class EngineUpdates:
    """The updates of all policies of an attempt, on one rank.

    Attributes:
        exporter: of what is in the model.
        versions: the policy version of each, by slot, as engines have it or are about to.
    """

    updates: Updates
    exporter: WeightExporter
    versions: list[int]

    def wait(self) -> None:
        """See `Updates.wait`."""
        self.updates.wait()

    def publish(self, version: int, slot: int = 0) -> dict[str, float]:
        """Put the policy of a slot, which the model holds, into all engines; `Updates.publish`."""
        self.versions[slot] = version
        return self.updates.publish(self.exporter.stream, sum(self.versions), slot)

    def join(self, version: int, slot: int = 0) -> None:
        """The same for engines that wait for weights, if there are any."""
        self.versions[slot] = version
        self.updates.join(self.exporter.stream, sum(self.versions), slot)

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
    shown: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> EngineUpdates:
    """What exports the weights of this rank, and what directs their updates.

    Args:
        patient: a gloo group of all ranks.
        written: see `WeightSender`.
        client: of the queue, on rank 0 alone.
        together: broadcasts rank 0's value to every rank.
        shown: has the model hold the adapter of a slot for a while.
    """
    options, rundir = context.options, context.rundir
    host = context.plan.trainers[0].at
    identity = context.plan.run_id.partition("/")[0]  # the stage's name is in its directory's
    driver = policy.ranks.rank == 0
    keys = client_keys(rundir, 0, "weights")
    own = context.plan.trainers[policy.ranks.rank].at
    sent = sent_part(policy, options)
    exporter = WeightExporter(sent, patient, own, keys, options.hf_checkpoint, options.refreshes_drafts)
    versions = [0] * slots(options)
    names = (lambda _: name_of(versions)) if len(versions) > 1 else str
    sender = WeightSender(rundir, host, options, driver, written, identity, name=names)
    firsts: list[FirstUpdate] = []
    if sent.of_adapters:
        under = WeightExporter(policy, patient, own, keys, options.hf_checkpoint)
        named = f"base-of-{identity}"
        base = WeightSender(rundir, host, options, driver, None, named, base=True, name=names)
        firsts.append(FirstUpdate(base, under.stream, under.leave))
    if len(versions) > 1:
        firsts += [
            FirstUpdate(sender, exporter.stream, around=partial(shown, slot), slot=slot)
            for slot in range(len(versions))
        ]
    start = options.engine_start_timeout
    updates = Updates(sender, rundir, start, client, partial(http_key, rundir), together, firsts)
    return EngineUpdates(updates, exporter, versions)
