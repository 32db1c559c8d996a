"""How one Megatron parameter is cut out of Hugging Face tensors, and put together again.

Every kind of `Rule` is a `Cut`, which says by `places` alone, in numbers, which rectangle of which tensor is where in
a rank's part.  `part` reads only those (a safetensors slice does that lazily), `join` is its exact inverse over all
tensor-parallel ranks, and the plan of a weight update asks the same function who holds what.

Invariant: join of all ranks' parts gives back the tensors bit for bit; rows that pad the vocabulary are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
#: fields of TransformerConfig, behind linear_
DELTA = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")


class HfTensors(Protocol):
    """A tensor that can be read in pieces: a safetensors slice, or a tensor."""

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class Shapes:
    """What cutting needs to know of the model: heads of queries, of keys and values, their size, and real vocabulary.

    Attributes:
        tp: ranks that the parameter is cut over.
        delta_heads: heads of keys and of values of a gated delta net, and the sizes of one of each.
    """

    heads: int
    groups: int
    head_size: int
    vocab: int
    tp: int
    delta_heads: tuple[int, int, int, int] = (0, 0, 0, 0)

    @classmethod
    def from_config(cls, fields: Mapping[str, Any], vocab: int, tp: int) -> Shapes:
        """Those of a model.

        Args:
            fields: `Family.transformer` of config.json.
        """
        heads = tuple(int(fields.get(f"linear_{name}") or 0) for name in DELTA)
        return cls(
            fields["num_attention_heads"], fields["num_query_groups"], fields["kv_channels"], vocab, tp, heads[:4]
        )


@dataclass(frozen=True)
class SourceRectangle:
    """One rectangle of a Hugging Face tensor in a rank's part.

    Attributes:
        tensor: which of the rule's.
        rows, columns: [start, end) in that tensor (columns None: all).
        at: the row of the part where it begins.
        left: the column of the part where it begins; None: it has all columns of the part.
    """

    tensor: int
    rows: tuple[int, int]
    columns: tuple[int, int] | None
    at: int
    left: int | None = None

    @property
    def index(self) -> tuple[slice, ...]:
        """Of the rectangle in its tensor."""
        rows = slice(*self.rows)
        return (rows,) if self.columns is None else (rows, slice(*self.columns))

    @property
    def inside(self) -> tuple[slice, ...]:
        """Its index in the part."""
        rows = slice(self.at, self.at + self.rows[1] - self.rows[0])
        if self.left is None or self.columns is None:
            return (rows,)
        return (rows, slice(self.left, self.left + self.columns[1] - self.columns[0]))


class Cut:
    """One kind of slicing."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        """Shapes of the Hugging Face tensors, from the shape of one rank's part."""
        raise NotImplementedError

    def places(self, rank: int, shape: Shape, s: Shapes) -> list[SourceRectangle]:
        """What is in a rank's part of `shape`, from its first row to its last; rows that pad are of no tensor."""
        raise NotImplementedError

    def part(self, tensors: Sequence[HfTensors], rank: int, shape: Shape, s: Shapes) -> torch.Tensor:
        """This rank's part, of `shape`."""
        import torch

        pieces = [tensors[place.tensor][place.index] for place in self.places(rank, shape, s)]
        if missing := shape[0] - sum(piece.shape[0] for piece in pieces):
            like = pieces[0] if pieces else tensors[0][0:0]
            pieces.append(like.new_zeros(missing, *shape[1:]))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def join(self, parts: Sequence[torch.Tensor], s: Shapes) -> list[torch.Tensor]:
        """The Hugging Face tensors from every rank's part, in order of rank."""
        shape = tuple(parts[0].shape)
        found = [parts[0].new_empty(full) for full in self.full(shape, s)]
        for rank, part in enumerate(parts):
            for place in self.places(rank, shape, s):
                found[place.tensor][place.index] = part[place.inside]
        return found


class Same(Cut):
    """Every rank holds the whole."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        return [shape]

    def places(self, rank: int, shape: Shape, s: Shapes) -> list[SourceRectangle]:
        return [SourceRectangle(0, (0, shape[0]), None, 0)]

    def join(self, parts: Sequence[torch.Tensor], s: Shapes) -> list[torch.Tensor]:
        return [parts[0]]


class RowParallel(Cut):
    """Columns are cut: RowParallelLinear takes a part of its input on each rank."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        return [(shape[0], shape[1] * s.tp)]

    def places(self, rank: int, shape: Shape, s: Shapes) -> list[SourceRectangle]:
        return [SourceRectangle(0, (0, shape[0]), (rank * shape[1], (rank + 1) * shape[1]), 0)]


class ColumnParallel(Cut):
    """Rows are cut."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        return [(shape[0] * s.tp, *shape[1:])]

    def places(self, rank: int, shape: Shape, s: Shapes) -> list[SourceRectangle]:
        return [SourceRectangle(0, (rank * shape[0], (rank + 1) * shape[0]), None, 0)]


class ColumnSwapped(ColumnParallel):
    """Rows are cut; the left half of the columns is the right half of the part's."""

    def places(self, rank: int, shape: Shape, s: Shapes) -> list[SourceRectangle]:
        rows = (rank * shape[0], (rank + 1) * shape[0])
        half = shape[1] // 2
        return [SourceRectangle(0, rows, (start, start + half), 0, half - start) for start in (half, 0)]

    def part(self, tensors: Sequence[HfTensors], rank: int, shape: Shape, s: Shapes) -> torch.Tensor:
        import torch

        return torch.cat([tensors[0][place.index] for place in self.places(rank, shape, s)], 1)


class Vocab(Cut):
    """Rows are cut, after zero rows are added to make the vocabulary a multiple of TP."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        return [(s.vocab, *shape[1:])]

    def places(self, rank: int, shape: Shape, s: Shapes) -> list[SourceRectangle]:
        first, last = (min(at * shape[0], s.vocab) for at in (rank, rank + 1))
        return [SourceRectangle(0, (first, last), None, 0)] if last > first else []


class GateUp(Cut):
    """Two tensors, each cut by rows; a rank holds its part of the one above its part of the other."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        return [(shape[0] // 2 * s.tp, *shape[1:])] * 2

    def places(self, rank: int, shape: Shape, s: Shapes) -> list[SourceRectangle]:
        rows = shape[0] // 2
        return [SourceRectangle(half, (rank * rows, (rank + 1) * rows), None, half * rows) for half in (0, 1)]


class FusedGateUp(Cut):
    """One tensor that holds two, one below the other; a rank holds its part of the upper above its part of the
    lower."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        return [(shape[0] * s.tp, *shape[1:])]

    def places(self, rank: int, shape: Shape, s: Shapes) -> list[SourceRectangle]:
        rows = shape[0] // 2
        starts = (rank * rows, (s.tp + rank) * rows)
        return [SourceRectangle(0, (start, start + rows), None, half * rows) for half, start in enumerate(starts)]


class Blocks(Cut):
    """Rows are cut of blocks of rows, one below the other."""

    def blocks(self, s: Shapes) -> Iterator[tuple[int, int, int]]:
        """(which tensor, its first row, rows) of each."""
        raise NotImplementedError

    def places(self, rank: int, shape: Shape, s: Shapes) -> list[SourceRectangle]:
        begin, end = rank * shape[0], (rank + 1) * shape[0]
        found = []
        top = 0
        for tensor, start, rows in self.blocks(s):
            first = max(begin, top)
            last = min(end, top + rows)
            if last > first:
                row = start + first - top
                found.append(SourceRectangle(tensor, (row, row + last - first), None, first - begin))
            top += rows
        return found


class Qkv(Blocks):
    """Queries, keys and values (weights or biases), laid [queries of group 0, key 0, value 0, queries of group 1, ...];
    rows cut.

    With fewer groups than ranks a group is on several ranks, and a rank's rows may begin within it.
    """

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        rows = s.groups * s.head_size
        return [(s.heads * s.head_size, *shape[1:]), (rows, *shape[1:]), (rows, *shape[1:])]

    def blocks(self, s: Shapes) -> Iterator[tuple[int, int, int]]:
        each = (s.heads // s.groups * s.head_size, s.head_size, s.head_size)
        for group in range(s.groups):
            yield from ((tensor, group * rows, rows) for tensor, rows in enumerate(each))


class GatedQkv(Blocks):
    """As Qkv; the tensor of the queries has a gate of the same size below the queries of each head, Megatron's part
    the queries of all heads of a group, then their gates."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        rows = s.groups * s.head_size
        return [(2 * s.heads * s.head_size, *shape[1:]), (rows, *shape[1:]), (rows, *shape[1:])]

    def blocks(self, s: Shapes) -> Iterator[tuple[int, int, int]]:
        size = s.head_size
        each = s.heads // s.groups
        for group in range(s.groups):
            heads = range(group * each, (group + 1) * each)
            yield from ((0, 2 * head * size, size) for head in heads)
            yield from ((0, (2 * head + 1) * size, size) for head in heads)
            yield 1, group * size, size
            yield 2, group * size, size


class DeltaIn(Blocks):
    """The input projection of a gated delta net, cut by key head: of each head the query, the key, and of its value
    heads the values, the output gates, betas and decays.

    One tensor has the first four of each key head together, one the last two: so Qwen3-Next's.
    """

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        keys, values, key, value = s.delta_heads
        return [(2 * keys * key + 2 * values * value, *shape[1:]), (2 * values, *shape[1:])]

    def blocks(self, s: Shapes) -> Iterator[tuple[int, int, int]]:
        keys, values, key, value = s.delta_heads
        each = values // keys
        wide = 2 * key + 2 * each * value
        for head in range(keys):
            yield 0, head * wide, wide
            yield 1, head * 2 * each, 2 * each


class DeltaInApart(Blocks):
    """As DeltaIn, of four tensors, as Qwen3.5 has them: queries, keys and values below one another, gates, betas,
    decays."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        keys, values, key, value = s.delta_heads
        rows = (2 * keys * key + values * value, values * value, values, values)
        return [(n, *shape[1:]) for n in rows]

    def blocks(self, s: Shapes) -> Iterator[tuple[int, int, int]]:
        keys, values, _, value = s.delta_heads
        each = values // keys
        for head in range(keys):
            yield from _convolved(head, s)
            yield 1, head * each * value, each * value
            yield 2, head * each, each
            yield 3, head * each, each


class DeltaConv(Blocks):
    """The convolution over a gated delta net's queries, keys and values, which one tensor has below one another; cut by
    key head."""

    def full(self, shape: Shape, s: Shapes) -> list[Shape]:
        keys, values, key, value = s.delta_heads
        return [(2 * keys * key + values * value, *shape[1:])]

    def blocks(self, s: Shapes) -> Iterator[tuple[int, int, int]]:
        return (block for head in range(s.delta_heads[0]) for block in _convolved(head, s))


def _convolved(head: int, s: Shapes) -> Iterator[tuple[int, int, int]]:
    """Query, key and values of one key head in tensor 0."""
    keys, values, key, value = s.delta_heads
    each = values // keys * value
    yield 0, head * key, key
    yield 0, (keys + head) * key, key
    yield 0, 2 * keys * key + head * each, each


CUTS: dict[str, Cut] = {
    "same": Same(),
    "over_heads": Same(),
    "row": RowParallel(),
    "column": ColumnParallel(),
    "column_swapped": ColumnSwapped(),
    "vocab": Vocab(),
    "gate_up": GateUp(),
    "fused_gate_up": FusedGateUp(),
    "qkv": Qkv(),
    "gated_qkv": GatedQkv(),
    "delta_in": DeltaIn(),
    "delta_in_apart": DeltaInApart(),
    "delta_conv": DeltaConv(),
}
