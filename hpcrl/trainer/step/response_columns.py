"""Numbers of tokens: between the packed rows of micro-batches and the whole responses of a share.

A column has one number for each response token of the share's samples, in the order of its rows, prompts left out.
Invariant: a rank's packed rows and the columns hold the same numbers; the columns are the same on all TP, CP and PP
ranks of a data-parallel rank, and tokens that are not trained on have 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hpcrl.trainer.parallel.parallel_state import Ranks
from hpcrl.trainer.step.packing import Packed


def to_columns(micro_batches: Sequence[Packed], rows: Sequence[torch.Tensor], size: int, ranks: Ranks) -> torch.Tensor:
    """float32 [size] from [r] of each micro-batch; collective over CP and PP.

    rows: on the last pipeline stage; ignored on the others.
    """
    column = torch.zeros(size, device=ranks.device)
    if ranks.last_stage:
        for packed, values in zip(micro_batches, rows, strict=True):
            column[packed.source] = values.float()
        if ranks.cp_size > 1:  # a token is on one CP rank, the others have 0
            dist.all_reduce(column, group=parallel_state.get_context_parallel_group())
    if ranks.pp_size > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(column, last, group=parallel_state.get_pipeline_model_parallel_group())
    return column


def to_rows(column: torch.Tensor, micro_batches: Sequence[Packed]) -> list[torch.Tensor]:
    """float32 [r] of each micro-batch from a column."""
    return [column[packed.source].float() for packed in micro_batches]
