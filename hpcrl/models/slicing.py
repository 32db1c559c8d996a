"""How one Megatron parameter is cut out of Hugging Face tensors, and put together again.

Every kind of `Rule` is a `Cut`.  `part` reads only this rank's rows or columns (a safetensors slice does that lazily);
`join` is its exact inverse over all tensor-parallel ranks.

Invariant: join of all ranks' parts gives back the tensors bit for bit; rows that pad the vocabulary are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Shape = tuple[int, ...]


class HfTensors(Protocol):
    """A tensor that can be read in pieces: a safetensors slice, or a tensor."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Shapes:
    """What cutting needs to know of the model: heads of queries, of keys and values, their size, and real vocabulary.

    tp: ranks that the parameter is cut over.
    """

    heads: int
    groups: int
    head_size: int
    vocab: int
    tp: int


class Cut(Protocol):
    """One kind of slicing."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        """Shapes of the Hugging Face tensors, from the shape of one rank's part."""

    def part(self, tensors: Sequence[HfTensors], rank: int, shape: Shape, s: Shapes) -> torch.Tensor:
        """This rank's part, of `shape`."""

    def join(self, parts: Sequence[torch.Tensor], s: Shapes) -> list[torch.Tensor]:
        """The Hugging Face tensors from every rank's part, in order of rank."""


class Same:
    """Every rank holds the whole."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        return [shape]

    def part(self, tensors: Sequence[HfTensors], rank: int, shape: Shape, s: Shapes) -> torch.Tensor:
        return tensors[0][:]

    def join(self, parts: Sequence[torch.Tensor], s: Shapes) -> list[torch.Tensor]:
        return [parts[0]]


class RowParallel:
    """Columns are cut: RowParallelLinear takes a part of its input on each rank."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        return [(shape[0], shape[1] * s.tp)]

    def part(self, tensors: Sequence[HfTensors], rank: int, shape: Shape, s: Shapes) -> torch.Tensor:
        return tensors[0][:, rank * shape[1] : (rank + 1) * shape[1]]

    def join(self, parts: Sequence[torch.Tensor], s: Shapes) -> list[torch.Tensor]:
        return [torch.cat(list(parts), dim=1)]


class ColumnParallel:
    """Rows are cut."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        return [(shape[0] * s.tp, *shape[1:])]

    def part(self, tensors: Sequence[HfTensors], rank: int, shape: Shape, s: Shapes) -> torch.Tensor:
        return tensors[0][rank * shape[0] : (rank + 1) * shape[0]]

    def join(self, parts: Sequence[torch.Tensor], s: Shapes) -> list[torch.Tensor]:
        return [torch.cat(list(parts))]


class Vocab(ColumnParallel):
    """Rows are cut, after zero rows are added to make the vocabulary a multiple of TP."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        return [(s.vocab, *shape[1:])]

    def part(self, tensors: Sequence[HfTensors], rank: int, shape: Shape, s: Shapes) -> torch.Tensor:
        rows = tensors[0][min(rank * shape[0], s.vocab) : min((rank + 1) * shape[0], s.vocab)]
        return torch.cat([rows, rows.new_zeros(shape[0] - rows.shape[0], *shape[1:])])

    def join(self, parts: Sequence[torch.Tensor], s: Shapes) -> list[torch.Tensor]:
        return [torch.cat(list(parts))[: s.vocab]]


class GateUp:
    """Two tensors, each cut by rows; a rank holds its part of the one above its part of the other."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        return [(shape[0] // 2 * s.tp, *shape[1:])] * 2

    def part(self, tensors: Sequence[HfTensors], rank: int, shape: Shape, s: Shapes) -> torch.Tensor:
        rows = shape[0] // 2
        return torch.cat([tensor[rank * rows : (rank + 1) * rows] for tensor in tensors])

    def join(self, parts: Sequence[torch.Tensor], s: Shapes) -> list[torch.Tensor]:
        return [torch.cat(halves) for halves in zip(*(part.chunk(2) for part in parts), strict=True)]


class FusedGateUp:
    """One tensor that holds two, one below the other; a rank holds its part of the upper above its part of the lower."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        return [(shape[0] * s.tp, *shape[1:])]

    def part(self, tensors: Sequence[HfTensors], rank: int, shape: Shape, s: Shapes) -> torch.Tensor:
        rows = shape[0] // 2
        starts = (rank * rows, (s.tp + rank) * rows)
        return torch.cat([tensors[0][start : start + rows] for start in starts])

    def join(self, parts: Sequence[torch.Tensor], s: Shapes) -> list[torch.Tensor]:
        return [torch.cat([half for halves in zip(*(part.chunk(2) for part in parts), strict=True) for half in halves])]


class Qkv:
    """Queries, keys and values (weights or biases), laid [queries of group 0, key 0, value 0, queries of group 1, ...]; rows cut.

    With fewer groups than ranks a group lies on several ranks, and a rank's rows may begin within it.
    """

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        rows = s.groups * s.head_size
        return [(s.heads * s.head_size, *shape[1:]), (rows, *shape[1:]), (rows, *shape[1:])]

    def part(self, tensors: Sequence[HfTensors], rank: int, shape: Shape, s: Shapes) -> torch.Tensor:
        first = rank * s.groups // s.tp  # the groups that this rank's rows lie in
        last = max(first + 1, (rank + 1) * s.groups // s.tp)
        each = [s.heads // s.groups * s.head_size, s.head_size, s.head_size]
        pieces = [tensor[first * n : last * n] for tensor, n in zip(tensors, each, strict=True)]
        packed = torch.cat([piece.reshape(last - first, -1, *shape[1:]) for piece in pieces], dim=1).flatten(0, 1)
        start = rank * shape[0] - first * sum(each)
        return packed[start : start + shape[0]]

    def join(self, parts: Sequence[torch.Tensor], s: Shapes) -> list[torch.Tensor]:
        packed = torch.cat(list(parts))
        each = [s.heads // s.groups * s.head_size, s.head_size, s.head_size]
        pieces = packed.view(s.groups, sum(each), *packed.shape[1:]).split(each, dim=1)
        return [piece.flatten(0, 1) for piece in pieces]


CUTS: dict[str, Cut] = {
    "same": Same(),
    "row": RowParallel(),
    "column": ColumnParallel(),
    "vocab": Vocab(),
    "gate_up": GateUp(),
    "fused_gate_up": FusedGateUp(),
    "qkv": Qkv(),
}
