"""Sums over ranks in an optimizer step: over the trained tokens of each sample, wherever context parallelism put them,
and over all that micro-batches report, by name; and what the trainer made of every sample, written next to the samples
for `hpcrl samples`.

Invariants: every CP rank gets the sum over all of them, and a loss that uses it has the gradient of the whole: what any
rank does with the sum flows back to the tokens of all; a report takes one collective, whatever the number of names or
samples, every rank takes part in it, and all have the same totals bit for bit.  A sample's record reads what the step
has computed anyway, and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hpcrl.algorithms.interface import Report
from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.errors import HpcrlError
from hpcrl.report.sample_records import Trained, write_trained
from hpcrl.trainer.collectives import broadcast_bytes
from hpcrl.trainer.parallel_state import Ranks
from hpcrl.trainer.step.packing import Packed, to_columns
from hpcrl.transport.share_format import Share


def record_samples(root: Path, options: Options, ranks: Ranks, share: Share, micro_batches: Sequence[Packed]) -> None:
    """Write the file of a rollout whose micro-batches have been trained on; collective.

    Nothing is written of a rollout that trained a critic alone.

    Args:
        root: the run directory.
    """
    size = len(share.batch.loss_mask)
    if share.rollout_id < options.num_critic_only_steps:
        return

    def column(name: str) -> np.ndarray:
        return to_columns(micro_batches, [getattr(packed, name) for packed in micro_batches], size, ranks).cpu().numpy()

    trainer = column("trainer")
    advantage = column("advantages") if needs(options).advantages else None
    sums = torch.from_numpy(_over_own(share, trainer, advantage)).to(ranks.device)
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    if ranks.rank == 0:
        write_trained(
            root, share.rollout_id, _rows(share, sums.cpu().numpy(), advantage is not None, not options.learns_labels)
        )


def _over_own(share: Share, trainer: np.ndarray, advantage: np.ndarray | None) -> np.ndarray:
    """float64 [n, 6] for the n samples of the table: of this share's the trained tokens, sums over them of advantage
    and of the trainer's and the engine's log-probs and their absolute difference, and the greatest difference; 0 for
    the others."""
    batch, mask = share.batch, share.batch.loss_mask
    differ = np.abs(trainer - batch.rollout_log_probs)
    advantage = np.zeros_like(trainer) if advantage is None else advantage
    parts = np.stack([np.ones_like(trainer), advantage, trainer, batch.rollout_log_probs, differ]) * mask
    found = np.zeros((len(share.table), 6))
    filled = np.flatnonzero(batch.rows["response_length"])  # reduceat would give an empty sample its neighbour's
    if len(filled):
        starts, rows = batch.response_offsets[filled], share.own[filled]
        found[rows, :5] = np.add.reduceat(parts, starts, axis=1, dtype=np.float64).T
        found[rows, 5] = np.maximum.reduceat(parts[4], starts)
    return found


def _rows(share: Share, sums: np.ndarray, advantages: bool, sampled: bool) -> list[Trained]:
    rows = []
    for (group, index), (tokens, *values, most) in zip(
        share.table[["group_index", "response_index"]].tolist(), sums.tolist(), strict=True
    ):
        advantage, trainer, engine, differ = (value / max(tokens, 1) for value in values)
        row = Trained(group, index, int(tokens), trainer, advantage if advantages else None)
        if sampled:
            row.engine = engine
            row.differ = differ
            row.differ_max = most
        rows.append(row)
    return rows


class Totals(msgspec.Struct, frozen=True):
    """Of one optimizer step over all micro-batches and ranks, by name.

    Attributes:
        means: sums, not yet divided.
        counted: sums, and what each is divided by.
        tokens: trained tokens.
    """

    means: dict[str, float]
    counted: dict[str, tuple[float, float]]
    maxima: dict[str, float]
    tokens: int

    def metrics(self, divisor: int) -> dict[str, float]:
        """Each name -> the mean, over what the loss counts (`divisor`) or over its own count, or the maximum; without
        those of nothing."""
        found = {name: value / max(divisor, 1) for name, value in self.means.items()}
        found |= {name: value / count for name, (value, count) in self.counted.items() if count}
        return found | {name: value for name, value in self.maxima.items() if value != -math.inf}


def total(reports: Sequence[Report], tokens: int, ranks: Ranks) -> Totals:
    """The totals over all ranks, equal on every one; collective.

    Args:
        reports: of this rank's micro-batches, none on pipeline stages without a loss.
        tokens: trained tokens of this rank.

    Raises:
        HpcrlError: if two micro-batches report different names.
    """
    found = _over_data(reports, tokens, ranks) if ranks.last_stage else None
    if ranks.pp_size == 1:
        assert found is not None
        return found
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    data = msgspec.msgpack.encode(found) if found is not None else None
    sent = broadcast_bytes(data, last, ranks.stages)  # from host to host: no stage's GPU is waited for
    return msgspec.msgpack.decode(sent, type=Totals)


def _over_data(reports: Sequence[Report], tokens: int, ranks: Ranks) -> Totals:
    """Over the micro-batches and the data- and context-parallel ranks of the last pipeline stage."""
    names = [list(getattr(reports[0], kind)) for kind in ("means", "counted", "maxima")]
    added = len(names[0]) + 2 * len(names[1])  # the rest are maxima
    rows = torch.stack([_row(report, names, ranks) for report in reports])
    count = torch.full((1,), tokens, dtype=torch.float64, device=ranks.device)
    mine = torch.cat([count, rows[:, :added].sum(0), rows[:, added:].amax(0)])
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    every = mine.new_empty(dist.get_world_size(group) * len(mine))
    dist.all_gather_into_tensor(every, mine, group=group)
    every = every.view(-1, len(mine))
    values = torch.cat([every[:, : 1 + added].sum(0), every[:, 1 + added :].amax(0)])
    total, *sums = values.cpu().tolist()  # the only look at the device in a step's report
    means, counted, maxima = np.split(sums, [len(names[0]), added])
    pairs = map(tuple, counted.reshape(-1, 2).tolist())
    return Totals(
        dict(zip(names[0], means.tolist(), strict=True)),
        dict(zip(names[1], pairs, strict=True)),
        dict(zip(names[2], maxima.tolist(), strict=True)),
        int(total),
    )


def _row(report: Report, names: list[list[str]], ranks: Ranks) -> torch.Tensor:
    """Its values in the order of `names`, float64."""
    parts = (report.means, report.counted, report.maxima)
    if [list(part) for part in parts] != names:
        odd = sorted(set(chain(*parts)) ^ set(chain(*names)))
        raise HpcrlError(
            f"the micro-batches of one step report different names: {', '.join(odd) or 'in another order'}"
        )
    every = [*report.means.values(), *chain(*report.counted.values()), *report.maxima.values()]
    values = [value.detach().double().to(ranks.device) for value in every]
    return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64, device=ranks.device)


def sums_over_samples(
    values: torch.Tensor, sample: torch.Tensor, samples: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """float [k, samples]: each row of `values` [k, r] summed over the tokens of every sample; collective over `group`.

    Args:
        sample: int64 [r], which sample a token belongs to.
        group: the context-parallel ranks; None: one rank has all.
    """
    own = values.new_zeros(len(values), samples).index_add(1, sample, values)
    return own if group is None else _SumOverRanks.apply(own, group)


class _SumOverRanks(torch.autograd.Function):
    """An all-reduce whose gradient is the all-reduce of the ranks' gradients: each rank's loss depends on every rank's
    part."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        found = own.clone()
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradient.clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None
