"""One rollout trained on a device that knows shapes alone, and what the host waited for.

waits = on_fake_device(trained, options, rank)     # of tests/support/ranks.py
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hpcrl.config.options import Options
from hpcrl.planning.rehearsal import device as fake_device
from hpcrl.planning.rehearsal import one_rank
from hpcrl.transport.share_format import SampleBatch


@dataclass
class Waits:
    """Of one rollout.

    Attributes:
        of: every wait's line, and how often.
        units: how many there were of what `allowed_waits.Wait.each` names.
        parts: what the policy ran with, as a run's log says it.
    """

    of: Counter[fake_device.Sync] = field(default_factory=Counter)
    units: dict[str, int] = field(default_factory=dict)
    parts: str = ""


def trained(options: Options, rank: int = 0, data: SampleBatch | None = None) -> Waits:
    """Train on a batch as `rank` of the options' layout, with the packages that this process has stand-ins for.

    Args:
        data: None: the one of tests/trainer/step/test_invariance.py.
    """
    from hpcrl.trainer.megatron import model, running_parts
    from hpcrl.trainer.step import train_batch
    from tests.trainer.step.test_invariance import shares

    with fake_device.FakeDevice() as device:
        ranks = fake_device.join(options, rank)
        policy = model.build(options, ranks)
        others = one_rank.other_models(policy, options)
        share = shares(options, data)[ranks.dp_rank]
        with one_rank.others_answer(device, policy, share, others):
            device.syncs.clear()
            train_batch.train(policy, ranks, options, share, others)
        parts = running_parts.line(policy, {})
    return Waits(Counter(device.syncs), _units(policy, others, share), parts)


def _units(policy: Any, others: Any, share: Any) -> dict[str, int]:
    models = [policy] if others.critic is None else [policy, others.critic]
    steps = len(share.micro_batches)
    parameters = sum(sum(1 for _ in module.parameters()) for each in models for module in each.modules)
    routers = [layer for module in policy.modules for layer in module.decoder.layers if hasattr(layer.mlp, "router")]
    micro_batches = sum(map(len, share.micro_batches))
    return {
        "rollout": 1,
        "step": steps * len(models),
        "chunk": steps * sum(len(each.chunks) for each in models),
        "parameter": parameters * steps,
        "pass": micro_batches * len(policy.chunks),
        # the pass of old log-probs, those under other weights, forward, and forward again in a recomputation
        "expert layer": len(routers) * micro_batches * 4,
    }
