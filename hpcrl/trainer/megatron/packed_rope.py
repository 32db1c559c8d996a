"""Rotary embedding of packed sequences, in place of Megatron's own for them.

Megatron's asks the device for the length of each sequence and goes through them in Python, twice in every layer: on a
GPU the host waits there and launches kernels for each sequence, and on a CPU 100 short sequences cost more than
attention.  Where Transformer Engine's fused kernel knows the model's rotation, neither is called.

Invariants: values and gradients are Megatron's; nothing is asked of the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

#: boundaries -> {(CP ranks, this one): the position of every row}: all layers of a micro-batch have the same boundaries
_positions: Any = WeakTensorKeyDictionary()


def positions(bounds: torch.Tensor, rows: int, cp_size: int = 1, cp_rank: int = 0) -> torch.Tensor:
    """Position of each of a CP rank's rows within its own sequence, int64 [rows], on the device of `bounds`.

    Args:
        bounds: [sequences + 1], 0 and where each ends, over all CP ranks; each a multiple of 2 x `cp_size`.
        rows: that this rank has.
    """
    known = _positions.setdefault(bounds, {})
    if (cp_size, cp_rank) not in known:
        known[cp_size, cp_rank] = _of_rows(bounds.long(), rows, cp_size, cp_rank)
    return known[cp_size, cp_rank]


def _of_rows(bounds: torch.Tensor, rows: int, cp_size: int, cp_rank: int) -> torch.Tensor:
    own = bounds // cp_size  # where each sequence's part ends among this rank's rows
    row = torch.arange(rows, device=bounds.device)
    sequence = torch.searchsorted(own, row, right=True) - 1
    within = row - own[sequence]
    if cp_size == 1:
        return within
    chunk = (own[sequence + 1] - own[sequence]) // 2  # a rank has chunks r and 2 CP - 1 - r
    second = within >= chunk
    return within + chunk * torch.where(second, 2 * cp_size - 2 - cp_rank, cp_rank)


def rotate_packed(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool | None = None,
    mscale: float = 1.0,
    cp_group: Any = None,
    mla_rotary_interleaved: bool = False,
) -> torch.Tensor:
    """Packed rows t [t, heads, d], rotated.

    The arguments for multi-latent attention have one name up to Megatron-core 0.18, and another from 0.19 on: its
    columns lie in pairs (0, 1), (2, 3), ..., and come out as halves.

    Args:
        cu_seqlens: boundaries with padding, not split by CP.
        freqs: [longest, 1, 1, rotary d].
    """
    if multi_latent_attention or mla_rotary_interleaved:
        t = torch.cat((t[..., ::2], t[..., 1::2]), dim=-1)
    rows = positions(cu_seqlens, len(t), cp_group.size(), cp_group.rank())
    cos, sin = ((f(freqs[:, 0]) * mscale).to(t.dtype) for f in (torch.cos, torch.sin))  # [longest, 1, rotary d]
    rotated = t[..., : cos.size(-1)]
    rest = t[..., cos.size(-1) :]
    if rotary_interleaved:  # pairs (0, 1), (2, 3), ...
        other = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), dim=-1).flatten(-2)
    else:  # pairs (0, d/2), (1, d/2 + 1), ...: the sign goes into the table, the halves change places
        half = cos.size(-1) // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        other = rotated.roll(half, -1)
    rotated = rotated * cos[rows] + other * sin[rows]
    return torch.cat((rotated, rest), dim=-1) if rest.size(-1) else rotated
