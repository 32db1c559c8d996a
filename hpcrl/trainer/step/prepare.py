"""What must be known of every token before the first optimizer step of a rollout: old and reference log-probs, advantages.

Invariant: all of it comes from the weights and samples as they are before any step, and is the same whatever the packing and
the layout: an estimator sees all samples of the rollout, and whole responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hpcrl.algorithms.advantages import compute_advantages
from hpcrl.algorithms.interface import RolloutBatch
from hpcrl.config.algorithm_needs import Needs, needs
from hpcrl.config.options import Options
from hpcrl.queue.share_format import Share
from hpcrl.sample import STATUSES, TRUNCATED
from hpcrl.trainer.megatron.host_weights import HostWeights
from hpcrl.trainer.megatron.model import Policy
from hpcrl.trainer.step import passes
from hpcrl.trainer.step.packing import Packed
from hpcrl.trainer.step.response_columns import to_columns, to_rows


@dataclass(frozen=True)
class OtherWeights:
    """Weights beside the trained ones, in host memory.  old: those that sampled this share, where the trained ones are newer."""

    reference: HostWeights | None = None
    old: HostWeights | None = None


NONE = OtherWeights()


def prepare(policy: Policy, options: Options, share: Share, steps: Sequence[Sequence[Packed]], others: OtherWeights) -> None:
    """Fill `old`, `reference` and `advantages` of every micro-batch in, as far as the options need them; collective."""
    wanted = needs(options)
    micro_batches = list(chain.from_iterable(steps))
    if wanted.reference:
        assert others.reference is not None
        _fill(micro_batches, "reference", _under(policy, options, steps, others.reference))
    if options.use_rollout_logprobs:
        _fill(micro_batches, "old", [packed.rollout for packed in micro_batches])
    elif wanted.old_logprobs:
        _fill(micro_batches, "old", _under(policy, options, steps, others.old))
    if wanted.advantages:
        batch = _rollout_batch(policy, share, micro_batches, wanted)
        advantages = compute_advantages(batch, options).advantages
        _fill(micro_batches, "advantages", to_rows(advantages, micro_batches))


def _under(
    policy: Policy, options: Options, steps: Sequence[Sequence[Packed]], weights: HostWeights | None
) -> list[torch.Tensor]:
    """Log-probs of every micro-batch under `weights`, or (None) those that are trained."""
    if weights is None:
        return [found for step in steps for found in passes.logprobs(policy, options, step)]
    with weights.swapped_in():
        return [found for step in steps for found in passes.logprobs(policy, options, step)]


def _fill(micro_batches: Sequence[Packed], name: str, values: Sequence[torch.Tensor]) -> None:
    for packed, value in zip(micro_batches, values, strict=True):
        setattr(packed, name, value)


def _rollout_batch(policy: Policy, share: Share, micro_batches: Sequence[Packed], wanted: Needs) -> RolloutBatch:
    """What an estimator sees: the table of all samples, and this data-parallel rank's responses."""
    device, table = policy.ranks.device, share.table
    size = len(share.batch.loss_mask)

    def column(name: str) -> torch.Tensor:
        rows = [getattr(packed, name) for packed in micro_batches]
        return to_columns(micro_batches, rows, size, policy.ranks)

    return RolloutBatch(
        reward=torch.tensor(table["reward"], dtype=torch.float64, device=device),
        group=torch.tensor(table["group"], device=device),
        length=torch.tensor(table["response_length"], dtype=torch.int64, device=device),
        truncated=torch.tensor(table["status"] == STATUSES.index(TRUNCATED), device=device),
        own=torch.tensor(share.own, dtype=torch.int64, device=device),
        mask=torch.tensor(share.batch.loss_mask != 0, device=device),
        old=column("old") if wanted.old_in_advantages else None,
        reference=column("reference") if wanted.old_in_advantages else None,
        baseline=torch.tensor(table["baseline"], dtype=torch.float64, device=device) if wanted.greedy else None,
        total=_over_data_parallel,
    )


def _over_data_parallel(sums: torch.Tensor) -> torch.Tensor:
    """The sum over data-parallel ranks, each of which is counted once, whatever its TP, CP and PP."""
    found = sums.clone()
    dist.all_reduce(found, group=parallel_state.get_data_parallel_group())
    return found
