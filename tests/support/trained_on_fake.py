"""One rollout trained on a device that knows shapes alone, and what the host waited for.

waits = on_fake_device(trained, options, rank)     # of tests/support/ranks.py
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist

from hpcrl.config.options import Options
from hpcrl.sample import SampleBatch
from tests.support import fake_device


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
        others = _others(policy, options)
        share = shares(options, data)[ranks.dp_rank]
        report = _Report(share.step_tokens * (1 + (others.critic is not None)))
        device.answers["step/sums.py", "_over_data"] = report.sums
        device.answers["p2p_communication.py", "_communicate_shapes"] = partial(_sent, _shape(policy, share))
        device.syncs.clear()
        with mock.patch.object(dist, "broadcast", partial(_broadcast, report, dist.broadcast)):
            train_batch.train(policy, ranks, options, share, others)
        parts = running_parts.line(running_parts.running_parts(policy, {}))
    return Waits(Counter(device.syncs), _units(policy, others, share), parts)


class _Report:
    """Of each step in turn: all ranks train on as many tokens as the batch has."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = iter(tokens)
        self._text = b""

    def sums(self, _: FrameType, sums: torch.Tensor) -> list[float]:
        """What the ranks with the loss read."""
        return [next(self._tokens), *[0.0] * (len(sums) - 1)]

    def length(self) -> int:
        """Bytes of what they send to the other stages."""
        from hpcrl.trainer.step.sums import Totals

        self._text = msgspec.msgpack.encode(Totals({}, {}, {}, next(self._tokens)))
        return len(self._text)

    def text(self) -> list[int]:
        """These bytes."""
        return list(self._text)


def _broadcast(report: _Report, stock: Any, tensor: torch.Tensor, src: int, *args: Any, **more: Any) -> Any:
    """In groups that are fake nothing comes from another rank: in place of what the stage with the loss says."""
    if tensor.device.type == "cpu" and src != dist.get_rank():
        tensor.copy_(torch.tensor(report.length() if tensor.dtype == torch.int64 else report.text()))
    return stock(tensor, src, *args, **more)


def _sent(shape: list[int], _: FrameType, sizes: torch.Tensor) -> list[int]:
    return shape


def _shape(policy: Any, share: Any) -> list[int]:
    """What a pipeline stage is sent: all micro-batches are alike."""
    from hpcrl.trainer.step import packing

    split = policy.config.sequence_parallel
    rows = packing.pack(share.batch, share.micro_batches[0][0], policy.ranks, split).tokens.size(1)
    return [rows // (policy.ranks.tp_size if split else 1), 1, policy.config.hidden_size]


def _others(policy: Any, options: Options) -> Any:
    """The models beside the trained one, of the same shapes."""
    from hpcrl.config.rules.algorithm_needs import needs
    from hpcrl.trainer.megatron import model
    from hpcrl.trainer.megatron.host_memory import HostWeights
    from hpcrl.trainer.reference_and_critic import critic_options
    from hpcrl.trainer.step.prepare import OtherWeights

    wanted = needs(options)
    return OtherWeights(
        reference=HostWeights(policy) if wanted.reference else None,
        teacher=HostWeights(policy) if wanted.teacher_model else None,
        critic=model.build(critic_options(options), policy.ranks, value_head=True) if wanted.critic else None,
    )


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
