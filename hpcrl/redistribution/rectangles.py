"""Rectangles: what one place needs of a tensor, cut where the holders change, and where the elements of each lie.

    for part, piece in sources(places, tensor, (top, bottom, left, right)):
        buffer[piece] = parameter[part]                  # the sender's side
    for own, piece in targets(rows, columns, rectangle):
        mine[own] = buffer[piece]                        # the worker's

Invariants: what `wanted` returns is disjoint, together exactly what is needed, and each rectangle of it is held whole
by all ranks that it names; indices are of plain two-dimensional arrays (a vector of n is [n, 1]) of any library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import numpy as np

from hpcrl.models.slicing import SourceRectangle
from hpcrl.redistribution.layouts import Pattern, Segment

Rectangle = tuple[int, int, int, int]  #: rows [a, b), columns [c, d)


def wanted(held: Pattern, needed: Pattern, workers: Collection[int]) -> list[tuple[Rectangle, tuple[int, ...]]]:
    """(rectangle, ranks that hold it) of all that some of `workers` need, joined where neighbours are held alike.

    ValueError if no rank holds a part of it.
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
        raise ValueError("no rank holds what is needed")
    holder[~asked] = 0
    known = list(sets)
    return [((rows[a], rows[b], columns[c], columns[d]), known[which]) for a, b, c, d, which in _joined(holder)]


def _cuts(segments: list[Segment]) -> list[int]:
    return sorted({at for segment in segments for at in segment})


def _place(rows: list[int], columns: list[int], own_rows: Segment, own_columns: Segment) -> tuple[slice, slice]:
    """Where a rectangle lies in the grid of all cuts."""
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
            yield (
                (slice(row, row + last - first), slice(begin - start, end - start)),
                (slice(first - top, last - top), slice(begin - left, end - left)),
            )


def targets(
    rows: Sequence[Sequence[int]], columns: Sequence[int] | None, area: Rectangle
) -> Iterator[tuple[Index, Index]]:
    """(index in what the worker holds, index in the piece); rows: (start, length) one below the other, columns: or None
    for all."""
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
