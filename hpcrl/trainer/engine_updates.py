"""What a trainer rank sends to engines, put together: all weights, or the weights once and then an adapter.

Invariant: every rank makes the same of the same options, since each export is collective.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpcrl.queue.auth import client_keys, http_key
from hpcrl.run.role import RoleContext
from hpcrl.trainer.megatron.model import Policy
from hpcrl.trainer.weight_export import WeightExporter, sent_part
from hpcrl.weights.disk import Written
from hpcrl.weights.sender import WeightSender
from hpcrl.weights.updates import BaseUpdate, Updates

if TYPE_CHECKING:
    from hpcrl.queue.client import QueueClient


def make_updates(
    context: RoleContext,
    policy: Policy,
    patient: dist.ProcessGroup,
    written: Written,
    client: QueueClient | None,
    together: Callable[[Any], Any],
) -> tuple[WeightExporter, Updates]:
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
    keys = client_keys(rundir, 0, "weights")
    own = context.plan.trainers[policy.ranks.rank].at
    sent = sent_part(policy, options)
    exporter = WeightExporter(sent, patient, own, keys, options.hf_checkpoint, options.refreshes_drafts)
    sender = WeightSender(rundir, host, options, driver, written, identity)
    base = None
    if sent.of_adapters:
        under = WeightExporter(policy, patient, own, keys, options.hf_checkpoint)
        named = f"base-of-{identity}"
        base = BaseUpdate(
            WeightSender(rundir, host, options, driver, None, named, base=True), under.stream, under.leave
        )
    start = options.engine_start_timeout
    return exporter, Updates(sender, rundir, start, client, partial(http_key, rundir), together, base)
