"""Where the elements of a piece lie: in a rank's part of a parameter, and in what a worker holds of the tensor.

    for part, piece in sources(places, tensor, (top, bottom, left, right)):
        buffer[piece] = parameter[part]                  # the sender's side
    for own, piece in targets(rows, columns, rectangle):
        mine[own] = buffer[piece]                        # the worker's

Invariant: indices are of plain two-dimensional arrays (a vector of n is [n, 1]), whatever library they are of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcrl.models.slicing import Place
from hpcrl.redistribution.rectangles import Rectangle

Index = tuple[slice, slice]


def sources(places: Sequence[Place], tensor: int, area: Rectangle) -> Iterator[tuple[Index, Index]]:
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
        first, last = max(top, row), min(bottom, row + length)
        if first < last and begin < end:
            yield (
                (slice(at + first - row, at + last - row), slice(begin - start, end - start)),
                (slice(first - top, last - top), slice(begin - left, end - left)),
            )
        at += length
