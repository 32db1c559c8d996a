"""Both sides of a weight update as numbers: which rectangles of each tensor every trainer rank holds and every worker
needs, cut where the holders change, and where the elements of each are.

    layouts = Layouts()
    held = layouts.pattern([TensorPart((0, 4), (0, 8), (0, 2)),          # two halves, two copies of each
                            TensorPart((4, 8), (0, 8), (1, 3))])
    layouts.add("model.norm.weight", (8, 8), 2, held, needed)
    for part, piece in sources(places, tensor, (top, bottom, left, right)):
        buffer[piece] = parameter[part]                  # the sender's side
    for own, piece in targets(rows, columns, rectangle):
        mine[own] = buffer[piece]                        # the worker's

A large model has tens of thousands of tensors and few patterns, so a tensor refers to its pattern by number.

Invariants: a tensor has two dimensions, (rows, columns), a vector (length, 1), one of more (rows, all else); the parts
that are held of one are disjoint and together are the whole; a part that is needed is inside it; what a rank holds is
what `hpcrl.models.slicing` cuts for it: nothing here knows a kind of cut.  What `wanted` returns is disjoint, together
exactly what is needed, and each rectangle of it is held whole by all ranks that it names; indices are of plain
two-dimensional arrays of any library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import numpy as np

from hpcrl.models.slicing import CUTS, Shape, Shapes, SourceRectangle

Rectangle = tuple[int, int, int, int]  #: rows [a, b), columns [c, d)


def wanted(held: Pattern, needed: Pattern, workers: Collection[int]) -> list[tuple[Rectangle, tuple[int, ...]]]:
    """(rectangle, ranks that hold it) of all that some of `workers` need, joined where neighbours have the same
    holders.

    Raises:
        ValueError: if no rank holds a part of it.
    """
    mine = [part for part in needed if not set(part.who).isdisjoint(workers)]
    if not mine:
        return []
    rows = _cuts([part.rows for part in (*held, *mine)])
    columns = _cuts([part.columns for part in (*held, *mine)])
    owners = [[set[int]() for _ in columns[1:]] for _ in rows[1:]]
    for part in held:
        down, across = _place(rows, columns, part.rows, part.columns)
        for line in owners[down]:
            for cell in line[across]:
                cell.update(part.who)
    asked = np.zeros((len(rows) - 1, len(columns) - 1), dtype=bool)
    for part in mine:
        asked[_place(rows, columns, part.rows, part.columns)] = True
    sets: dict[tuple[int, ...], int] = {(): 0}
    numbers = [[sets.setdefault(tuple(sorted(cell)), len(sets)) for cell in line] for line in owners]
    holder = np.asarray(numbers).reshape(asked.shape)
    if (holder[asked] == 0).any():
        raise ValueError("no rank holds the needed tensor")
    holder[~asked] = 0
    known = list(sets)
    return [((rows[a], rows[b], columns[c], columns[d]), known[which]) for a, b, c, d, which in _joined(holder)]


def _cuts(segments: list[Segment]) -> list[int]:
    return sorted({at for segment in segments for at in segment})


def _place(rows: list[int], columns: list[int], own_rows: Segment, own_columns: Segment) -> tuple[slice, slice]:
    """Where a rectangle is in the grid of all cuts."""
    return (
        slice(rows.index(own_rows[0]), rows.index(own_rows[1])),
        slice(columns.index(own_columns[0]), columns.index(own_columns[1])),
    )


def _joined(grid: np.ndarray) -> list[tuple[int, int, int, int, int]]:
    """Neighbouring cells with the same number as (first row, end, first column, end, number); those with 0 are left
    out."""
    open_ = dict[tuple[int, int, int], int]()
    done = list[tuple[int, int, int, int, int]]()
    for row in range(grid.shape[0] + 1):
        runs = _runs(grid[row]) if row < grid.shape[0] else set()
        for run in [run for run in open_ if run not in runs]:
            done.append((open_.pop(run), row, *run))
        for run in runs:
            open_.setdefault(run, row)
    return sorted(done)


def _runs(line: np.ndarray) -> set[tuple[int, int, int]]:
    """(first, end, number) of neighbours that are equal and not 0."""
    edges = [0, *(np.flatnonzero(np.diff(line)) + 1).tolist(), len(line)]
    return {(a, b, int(line[a])) for a, b in pairwise(edges) if line[a]}


Index = tuple[slice, slice]


def sources(places: Sequence[SourceRectangle], tensor: int, area: Rectangle) -> Iterator[tuple[Index, Index]]:
    """(index in the rank's part, index in the piece) of everything of the rectangle that the part has."""
    top, bottom, left, right = area
    for place in places:
        first = max(top, place.rows[0])
        last = min(bottom, place.rows[1])
        start = place.columns[0] if place.columns else 0
        begin = max(left, start)
        end = min(right, place.columns[1] if place.columns else right)
        if place.tensor == tensor and first < last and begin < end:
            row = place.at + first - place.rows[0]
            shift = (place.left or 0) - start
            yield (
                (slice(row, row + last - first), slice(begin + shift, end + shift)),
                (slice(first - top, last - top), slice(begin - left, end - left)),
            )


def targets(
    rows: Sequence[Sequence[int]], columns: Sequence[int] | None, area: Rectangle
) -> Iterator[tuple[Index, Index]]:
    """(index in what the worker holds, index in the piece).

    Args:
        rows: (start, length) one below the other.
        columns: (start, length), or None for all.
    """
    top, bottom, left, right = area
    start = columns[0] if columns is not None else 0
    begin = max(left, start)
    end = min(right, start + columns[1]) if columns is not None else right
    at = 0
    for row, length in rows:
        first = max(top, row)
        last = min(bottom, row + length)
        if first < last and begin < end:
            yield (
                (slice(at + first - row, at + last - row), slice(begin - start, end - start)),
                (slice(first - top, last - top), slice(begin - left, end - left)),
            )
        at += length


Segment = tuple[int, int]  #: [start, end)


@dataclass(frozen=True)
class TensorPart:
    """One rectangle of a tensor, and the numbers of the ranks that hold it or the workers that need it."""

    rows: Segment
    columns: Segment
    who: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it."""
        return self.rows[0] >= self.rows[1] or self.columns[0] >= self.columns[1]


Pattern = tuple[TensorPart, ...]


@dataclass(frozen=True)
class Worker:
    """A worker of an engine: which engine, and the host that it runs on."""

    engine: int
    host: str


@dataclass
class Layouts:
    """Every tensor of an update, by columns: name, shape, bytes of an element, and the numbers of both of its
    patterns."""

    names: list[str] = field(default_factory=list)
    shapes: list[tuple[int, int]] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)
    patterns: list[Pattern] = field(default_factory=list)
    _numbers: dict[Pattern, int] = field(default_factory=dict)

    def pattern(self, parts: Iterable[TensorPart]) -> int:
        """The number of a pattern; equal ones have the same.  Empty parts are left out."""
        key = tuple(part for part in parts if not part.empty and part.who)
        if key not in self._numbers:
            self._numbers[key] = len(self.patterns)
            self.patterns.append(key)
        return self._numbers[key]

    def add(self, name: str, shape: tuple[int, ...], item: int, held: int, needed: int) -> None:
        """One more tensor.

        Args:
            item: bytes of an element as it is sent.
        """
        self.names.append(name)
        self.shapes.append((shape[0], prod(shape[1:])))
        self.items.append(item)
        self.held.append(held)
        self.needed.append(needed)


def whole(shape: tuple[int, ...], who: Iterable[int]) -> TensorPart:
    """All of a tensor."""
    return TensorPart((0, shape[0]), (0, prod(shape[1:])), tuple(who))


Span = Sequence[int]  #: (start, length)


def held_parts(
    kind: str, shape: Shape, shapes: Shapes, copies: Sequence[tuple[int, ...]]
) -> list[tuple[Shape, Pattern]]:
    """(shape, who holds which part) of each tensor of a rule of `kind`.

    Args:
        shape: of one rank's part of the parameter.
        copies: for each part, in order of TP (of an expert's: ETP) rank, the ranks that hold it.
    """
    cut = CUTS[kind]
    full = cut.full(shape, shapes)
    parts: list[list[TensorPart]] = [[] for _ in full]
    for number, ranks in enumerate(copies):
        for place in cut.places(number, shape, shapes):
            width = prod(full[place.tensor][1:])
            parts[place.tensor].append(TensorPart(place.rows, place.columns or (0, width), ranks))
    return [(wide, merged(found)) for wide, found in zip(full, parts, strict=True)]


def merged(parts: Iterable[TensorPart]) -> Pattern:
    """Neighbouring rows of the same columns that the same ranks hold become one part; equal parts of several become
    one."""
    who: dict[tuple[tuple[int, int], tuple[int, int]], set[int]] = {}
    for part in parts:
        who.setdefault((part.columns, part.rows), set()).update(part.who)
    found: list[TensorPart] = []
    for (columns, rows), ranks in sorted(who.items()):
        part = TensorPart(rows, columns, tuple(sorted(ranks)))
        last = found[-1] if found else None
        if last and last.columns == columns and last.rows[1] == rows[0] and last.who == part.who:
            found[-1] = TensorPart((last.rows[0], rows[1]), columns, part.who)
        else:
            found.append(part)
    return tuple(found)


def needed_parts(shape: Shape, spans: Iterable[tuple[Sequence[int], Sequence[Span], Span | None]]) -> Pattern:
    """What workers need of a tensor.

    Args:
        spans: (workers, rows that each of them holds, their columns or None for all), as a manifest has them.
    """
    width = prod(shape[1:])
    who: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
    for workers, rows, columns in spans:
        across = (columns[0], columns[0] + columns[1]) if columns is not None else (0, width)
        for start, length in rows:
            who.setdefault(((start, start + length), across), []).extend(workers)
    return tuple(TensorPart(rows, columns, tuple(sorted(workers))) for (rows, columns), workers in who.items())
