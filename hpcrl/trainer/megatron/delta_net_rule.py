"""The gated delta rule and the causal convolution in front of it, for sequences of equal padded length.  Pure: imports
nothing of Megatron.

A head keeps a state S [key size, value size], zero at the start of a sequence.  Of each row with key k, value v, query
q, decay g <= 0 and rate b (Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464, equation 10):

    S <- exp(g) (S - b k (k S)) + b k v          out = q S

Row by row that is slow.  Of CHUNK rows at a time the rates and decays make one triangular system for what each row
writes into the state (the paper's section 3.3); between chunks the state is carried.

Invariant: a row sees its own sequence's rows up to itself, and no other; padding is behind a sequence's last row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hpcrl.models.shared.hybrid import CHUNK


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """What the rule gives for each row, fp32 [n, heads, rows, value size].

    Args:
        query, key: [n, heads, rows, key size], of norm 1 where the model wants that, queries scaled.
        value: [n, heads, rows, value size].
        decay: g, the logarithm of what is left of the state [n, heads, rows].
        rate: b, how much of the value is written [n, heads, rows].
        chunk: rows that are solved together.
    """
    rows = query.size(2)
    chunk = min(chunk, rows)
    query, key, value = (_chunked(x.float(), chunk) for x in (query, key, value))
    decay, rate = (_chunked(x.float()[..., None], chunk) for x in (decay, rate))  # [n, heads, chunks, chunk, 1]
    total = decay.cumsum(3)  # since the start of the chunk, this row's own decay included
    between = total - total.transpose(3, 4)  # [.., i, j]: from row j to row i
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    between = between.masked_fill(later, -torch.inf).exp()  # before exp: what a later row would need overflows
    # row i writes b (v - what the state has at k by then), which rows j < i of the chunk have changed
    system = rate * (key @ key.transpose(3, 4)) * between
    wanted = torch.cat([rate * value, rate * total.exp() * key], dim=-1)
    written, carried = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True).split(
        [value.size(-1), key.size(-1)], dim=-1
    )
    seen = (query @ key.transpose(3, 4)) * between
    query = query * total.exp()
    last = total[..., -1:, :]
    key = key * (last - total).exp()
    state = value.new_zeros(*value.shape[:2], key.size(-1), value.size(-1))
    out = []
    for i in range(query.size(2)):
        new = written[:, :, i] - carried[:, :, i] @ state
        out.append(query[:, :, i] @ state + seen[:, :, i] @ new)
        state = last[:, :, i].exp() * state + key[:, :, i].transpose(2, 3) @ new
    return torch.cat(out, dim=2)[:, :, :rows]


def _chunked(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """[n, heads, rows, d] -> [n, heads, chunks, chunk, d], with zero rows behind."""
    x = F.pad(x, (0, 0, 0, -x.size(2) % chunk))
    return x.unflatten(2, (-1, chunk))


def causal_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each channel's weighted sum of a row and those before it in the sequence, [n, rows, channels].

    Args:
        x: [n, rows, channels].
        weight: [channels, 1, k]; the last counts the row itself.
    """
    columns = F.pad(x.transpose(1, 2), (weight.size(-1) - 1, 0))
    return F.conv1d(columns, weight, groups=x.size(-1)).transpose(1, 2)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of norm 1, fp32 (with 1e-6 below the root, as transformers and the fla kernels have it)."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
