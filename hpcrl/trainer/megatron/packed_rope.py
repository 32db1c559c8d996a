"""Rotary embedding of packed sequences, in place of two of Megatron's functions that need CUDA or loop over sequences.

Invariant: the numbers are Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch

from hpcrl.trainer.megatron.thd import positions


def table_of_cp_rank(table: Any, dim: int, group: Any) -> Any:
    """The two zig-zag chunks of a rotary table along `dim` that this context-parallel rank holds."""
    size, rank = group.size(), group.rank()
    chunks = table.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


def packed(
    t: Any,
    cu_seqlens: Any,
    freqs: Any,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool | None = None,
    mscale: float = 1.0,
    cp_group: Any = None,
    mla_rotary_interleaved: bool = False,
) -> Any:
    """Rotary embedding of packed rows t [t, heads, d]; freqs [longest, 1, 1, rotary d]; cu_seqlens padded, not split by
    CP.

    What is said of multi-latent attention has one name up to Megatron-core 0.18, and another from 0.19 on.
    """
    assert not (multi_latent_attention or mla_rotary_interleaved), "multi-latent attention takes another path"
    rows = positions(tuple(cu_seqlens.tolist()), cp_group.size(), cp_group.rank())
    cos, sin = ((f(freqs[:, 0]) * mscale).to(t.dtype) for f in (torch.cos, torch.sin))  # [longest, 1, rotary d]
    rotated, rest = t[..., : cos.size(-1)], t[..., cos.size(-1) :]
    if rotary_interleaved:  # pairs (0, 1), (2, 3), ...
        other = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), dim=-1).flatten(-2)
    else:  # pairs (0, d/2), (1, d/2 + 1), ...: the sign goes into the table, the halves change places
        half = cos.size(-1) // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        other = rotated.roll(half, -1)
    rotated = rotated * cos[rows] + other * sin[rows]
    return torch.cat((rotated, rest), dim=-1) if rest.size(-1) else rotated
