"""Gathering and reduce-scattering pieces of unequal length, which gloo refuses: experts that several ranks share need
both.

Invariant: results and the order of the sums are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def gather(piece: torch.Tensor, group: Any, sizes: Sequence[int]) -> torch.Tensor:
    """The pieces of all ranks laid end to end [sum of sizes, ...]; sizes: rows of each rank's piece."""
    if (longest := max(sizes)) == 0:
        return piece
    padded = torch.cat([piece, piece.new_zeros(longest - piece.size(0), *piece.shape[1:])])
    found = piece.new_empty(longest * len(sizes), *piece.shape[1:])
    dist.all_gather_into_tensor(found, padded.contiguous(), group=group)
    return torch.cat([rows[:size] for rows, size in zip(found.split(longest), sizes, strict=True)])


def reduce_scatter(whole: torch.Tensor, group: Any, sizes: Sequence[int]) -> torch.Tensor:
    """The sum over ranks of their `whole`'s rows that belong to this rank; sizes: rows of each rank."""
    mine, ranks = sizes[group.rank()], len(sizes)
    found = whole.new_empty(mine * ranks, *whole.shape[1:])
    dist.all_to_all_single(found, whole.contiguous(), [mine] * ranks, list(sizes), group=group)
    return found.view(ranks, mine, *whole.shape[1:]).sum(0)
