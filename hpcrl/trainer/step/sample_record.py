"""What the trainer made of every sample of a rollout, written next to the samples for `hpcrl samples`.

Invariants: it reads what the step has computed anyway, and changes nothing; one small sum over data-parallel ranks a
rollout, whatever the number of samples; every rank takes part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hpcrl.config.options import Options
from hpcrl.config.rules.algorithm_needs import needs
from hpcrl.queue.share_format import Share
from hpcrl.report.sample_records import Trained, write_tokens, write_trained
from hpcrl.trainer.parallel_state import Ranks
from hpcrl.trainer.step.packing import Packed, to_columns


def record_samples(root: Path, options: Options, ranks: Ranks, share: Share, micro_batches: Sequence[Packed]) -> None:
    """Write the files of a rollout whose micro-batches have been trained on; collective.

    root: the run directory.

    Nothing is written of a rollout that trained a critic alone.
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
    every = options.save_token_data
    first = ranks.tp_rank == ranks.cp_rank == ranks.pp_rank == 0
    if every and share.rollout_id % every == 0 and first:
        write_tokens(root, share.rollout_id, ranks.dp_rank, _columns(share, trainer, advantage))


def _over_own(share: Share, trainer: np.ndarray, advantage: np.ndarray | None) -> np.ndarray:
    """float64 [n, 6] for the n samples of the table: of this share's the trained tokens, sums over them of advantage
    and of the trainer's and the engine's log-probs and their absolute difference, and the greatest difference; 0 for
    the others."""
    batch = share.batch
    mask = share.batch.loss_mask
    differ = np.abs(trainer - batch.logprobs)
    parts: list[np.ndarray | None] = [advantage, trainer, batch.logprobs, differ]
    if not mask.all():
        parts = [None if part is None else part * mask for part in parts]
    found = np.zeros((len(share.table), 6))
    filled = np.flatnonzero(batch.rows["response_length"])  # reduceat would give an empty sample its neighbour's
    if len(filled):
        starts = batch.response_offsets[filled]
        rows = share.own[filled]
        found[rows, 0] = np.add.reduceat(mask, starts, dtype=np.int64)
        for number, part in enumerate(parts, 1):
            if part is not None:
                found[rows, number] = np.add.reduceat(part, starts, dtype=np.float64)
        found[rows, 5] = np.maximum.reduceat(parts[3], starts)  # type: ignore[arg-type]
    return found


def _rows(share: Share, sums: np.ndarray, advantages: bool, sampled: bool) -> list[Trained]:
    rows = []
    for (group, index), (tokens, *values, most) in zip(
        share.table[["group", "index"]].tolist(), sums.tolist(), strict=True
    ):
        advantage, trainer, engine, differ = (value / max(tokens, 1) for value in values)
        row = Trained(group, index, int(tokens), trainer, advantage if advantages else None)
        if sampled:
            row.engine = engine
            row.differ = differ
            row.differ_max = most
        rows.append(row)
    return rows


def _columns(share: Share, trainer: np.ndarray, advantage: np.ndarray | None) -> dict[str, np.ndarray]:
    """A file of tokens: this share's responses; NaN for what is not known of a token."""
    batch = share.batch
    trained = batch.loss_mask != 0
    response = np.arange(int(batch.rows["response_length"].sum())) - np.repeat(
        batch.response_offsets[:-1], batch.rows["response_length"]
    )
    prompts = batch.rows["length"] - batch.rows["response_length"]
    places = np.repeat(batch.token_offsets[:-1] + prompts, batch.rows["response_length"]) + response
    return {
        "own": share.own,
        "response_length": batch.rows["response_length"],
        "tokens": batch.tokens[places],
        "mask": batch.loss_mask,
        "engine": batch.logprobs,
        "trainer": np.where(trained, trainer, np.nan),
        "advantage": np.where(trained, np.nan if advantage is None else advantage, np.nan),
    }
