"""What must be known of every token before the first optimizer step of a rollout: log-probs, values, advantages.

Invariant: all of it comes from the weights and samples as they are before any step, and is the same whatever the
packing and the layout: an estimator sees all samples of the rollout, and whole responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hpcrl.algorithms.advantages import compute_advantages
from hpcrl.algorithms.interface import RolloutBatch
from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import Needs, needs, routing
from hpcrl.errors import DataError
from hpcrl.trainer.custom_hooks import TrainerHooks
from hpcrl.trainer.lora.layer import BaseAsReference
from hpcrl.trainer.megatron.host_memory import HostWeights
from hpcrl.trainer.megatron.model import Policy
from hpcrl.trainer.step import passes
from hpcrl.trainer.step.packing import Packed, to_columns, to_rows
from hpcrl.trainer.step.routing_replay import How
from hpcrl.trainer.step.token_logprobs import TeacherRows
from hpcrl.transport.share_format import Share, responses_of
from hpcrl.utils.device_copies import to_device
from hpcrl.utils.sample_parts import PENDING, STATUSES, TRUNCATED

#: what the old policy's pass does about experts, by whose choice is trained with
OLD_PASS: dict[str, How] = {"own": "own", "old": "record", "engine": "replay"}


@dataclass(frozen=True)
class OtherWeights:
    """The models other than the policy.

    In host memory: reference; old, the weights that sampled this share, where the trained ones are newer; teacher.

    Attributes:
        critic: a separate model, trained too.
    """

    reference: HostWeights | BaseAsReference | None = None
    old: HostWeights | None = None
    teacher: HostWeights | None = None
    critic: Policy | None = None


NONE = OtherWeights()
#: name of a column -> field of `Packed`
FIELDS = {"ref_log_probs": "reference", "log_probs": "old", "values": "values"}


def prepare(
    policy: Policy,
    options: Options,
    share: Share,
    pack: Callable[[Share], list[list[Packed]]],
    others: OtherWeights,
    hooks: TrainerHooks,
) -> tuple[Share, list[list[Packed]], dict[str, float]]:
    """Pack the share, and fill in what `Packed` has None for, as far as the options need it; collective.

    Returns:
        The share and its micro-batches by optimizer step, with the loss masks that are trained on; metrics, the same on
        every rank: means over all their tokens, in slime's names.
    """
    steps = pack(share)
    wanted = needs(options)
    columns = {}
    micro_batches = list(chain.from_iterable(steps))

    def take(name: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
        _give(micro_batches, name, values)
        return to_columns(micro_batches, values, len(share.batch.loss_mask), policy.ranks)

    if wanted.reference:
        assert others.reference is not None
        hooks.before_log_probs(policy, "ref_")
        columns["ref_log_probs"] = take("reference", _under(policy, options, steps, others.reference))
    if options.use_rollout_logprobs:
        columns["log_probs"] = take("old", [packed.rollout for packed in micro_batches])
    elif wanted.old_logprobs:
        hooks.before_log_probs(policy, "")
        columns["log_probs"] = take("old", _under(policy, options, steps, others.old, OLD_PASS[routing(options)]))
    if wanted.teacher:
        columns["teacher_log_probs"] = _teacher_column(policy, options, share, steps, others.teacher)
        columns["opd_reverse_kl"] = columns["log_probs"] - columns["teacher_log_probs"]
    if wanted.critic:
        assert others.critic is not None
        columns["values"] = take("values", [found for step in steps for found in passes.values(others.critic, step)])
    if hooks.edits_masks:
        share = hooks.edited(share, columns, policy.ranks.device)
        chosen = [packed.choices for packed in micro_batches]  # of the same rows, whatever their masks
        steps = pack(share)
        micro_batches = list(chain.from_iterable(steps))
        _give(micro_batches, "choices", chosen)
        for name, column in columns.items():
            if name in FIELDS:
                _give(micro_batches, FIELDS[name], to_rows(column, micro_batches))
    if wanted.divergence:  # of the rows that are trained on, so after the masks are what they stay
        assert others.teacher is not None
        _give(micro_batches, "teacher", _teacher_rows(policy, options, steps, others.teacher))
    if wanted.advantages:
        found = compute_advantages(_rollout_batch(policy, share, columns, wanted), options)
        for name, column in found._asdict().items():
            if column is not None:
                columns[name] = column
                _give(micro_batches, name, to_rows(column, micro_batches))
    mask = to_device(share.batch.loss_mask != 0, policy.ranks.device)
    return share, steps, _means(columns, mask) if columns else {}


def _give(micro_batches: Sequence[Packed], name: str, values: Sequence[Any]) -> None:
    for packed, value in zip(micro_batches, values, strict=True):
        setattr(packed, name, value)


def _means(columns: dict[str, torch.Tensor], mask: torch.Tensor) -> dict[str, float]:
    sums = torch.stack([mask.double().sum(), *(column.double().where(mask, 0.0).sum() for column in columns.values())])
    count, *values = _over_data_parallel(sums).tolist()
    return {f"rollout/{name}": value / max(count, 1) for name, value in zip(columns, values, strict=True)}


def _under(
    policy: Policy,
    options: Options,
    steps: Sequence[Sequence[Packed]],
    weights: HostWeights | BaseAsReference | None,
    experts: How = "own",
) -> list[torch.Tensor]:
    """Log-probs of every micro-batch under `weights`, or (None) those that are trained."""
    if weights is None:
        return [found for step in steps for found in passes.logprobs(policy, options, step, experts)]
    with weights.swapped_in():
        return [found for step in steps for found in passes.logprobs(policy, options, step, experts)]


def _teacher_column(
    policy: Policy, options: Options, share: Share, steps: Sequence[Sequence[Packed]], teacher: HostWeights | None
) -> torch.Tensor:
    """The teacher's log-probs of the response tokens: from its weights, or as they came with the samples."""
    if teacher is not None:
        found = _under(policy, options, steps, teacher)
        return to_columns(list(chain.from_iterable(steps)), found, len(share.batch.loss_mask), policy.ranks)
    if "teacher_log_probs" not in share.batch.extra:
        raise DataError(
            f"the samples of rollout {share.rollout_id} bring no log-probs of a teacher, --use-opd needs them"
        )
    return to_device(np.array(share.batch.extra["teacher_log_probs"]), policy.ranks.device)


def _teacher_rows(
    policy: Policy, options: Options, steps: Sequence[Sequence[Packed]], teacher: HostWeights
) -> list[TeacherRows | None]:
    """What is needed of the teacher for its whole distribution: one layer of it, and the states that go into that."""
    weight = passes.output_weight(policy)
    with teacher.swapped_in():
        hidden = [found for step in steps for found in passes.hidden_states(policy, step)]
    if weight is None:
        return [None] * sum(map(len, steps))
    own = teacher.counterpart(weight)
    direction = options.opd_kl_type
    assert direction != "sampled"
    return [TeacherRows(state, own, direction) for state in hidden]


def _rollout_batch(policy: Policy, share: Share, columns: dict[str, torch.Tensor], wanted: Needs) -> RolloutBatch:
    """What an estimator sees: the table of all samples, and this data-parallel rank's responses."""
    table = share.table
    put = lambda array, kind=None: to_device(np.array(array, kind), policy.ranks.device)  # noqa: E731
    return RolloutBatch(
        reward=put(table["reward"], np.float64),
        group=put(table["group_index"]),
        length=put(table["response_length"], np.int64),
        truncated=put(table["status"] == STATUSES.index(TRUNCATED)),
        own=put(share.own, np.int64),
        mask=put(share.batch.loss_mask != 0),
        old=columns.get("log_probs"),
        reference=columns.get("ref_log_probs"),
        teacher=columns.get("teacher_log_probs"),
        values=columns.get("values"),
        response=_responses(table, policy.ranks.device),
        baseline=put(table["baseline"], np.float64) if wanted.greedy else None,
        total=_over_data_parallel,
    )


def _responses(table: np.ndarray, device: torch.device) -> torch.Tensor | None:
    """Which response each sample is of; None where every response is one sample that counts."""
    numbers = np.where(table["status"] == STATUSES.index(PENDING), -1, responses_of(table))
    if len(np.unique(numbers[numbers >= 0])) == len(numbers):
        return None
    return to_device(numbers, device)


def _over_data_parallel(sums: torch.Tensor) -> torch.Tensor:
    """The sum over data-parallel ranks; each is counted once, whatever its TP, CP and PP."""
    found = sums.clone()
    dist.all_reduce(found, group=parallel_state.get_data_parallel_group())
    return found
