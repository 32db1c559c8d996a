"""Rectangles: what one place needs of a tensor, cut where those who hold it change.

Invariant: what `wanted` gives is disjoint, together exactly what is needed, and each of it is held whole by all that it
names.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import numpy as np

from hpcrl.redistribution.layouts import Pattern, Segment

Rectangle = tuple[int, int, int, int]  #: rows [a, b), columns [c, d)


def wanted(held: Pattern, needed: Pattern, workers: Collection[int]) -> list[tuple[Rectangle, tuple[int, ...]]]:
    """(rectangle, ranks that hold it) of all that some of `workers` need, joined where neighbours are held alike.

    ValueError if nobody holds a part of it.
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
        raise ValueError("nobody holds what is needed")
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
