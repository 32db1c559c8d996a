"""What trainer ranks hold and engine workers need of each Hugging Face tensor, as parts.

Invariant: what a rank holds is what `hpcrl.models.slicing` cuts for it; nothing here knows a kind of cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpcrl.models.slicing import CUTS, Shape, Shapes
from hpcrl.redistribution.layouts import Part, Pattern

Span = Sequence[int]  #: (start, length)


def held_parts(
    kind: str, shape: Shape, shapes: Shapes, copies: Sequence[tuple[int, ...]]
) -> list[tuple[Shape, Pattern]]:
    """(shape, who holds which part) of each tensor of a rule of `kind`.

    shape: of one rank's part of the parameter; copies: for each part, in order of TP (of an expert's: ETP) rank, the
    ranks that hold it.
    """
    cut = CUTS[kind]
    full = cut.full(shape, shapes)
    parts: list[list[Part]] = [[] for _ in full]
    for number, ranks in enumerate(copies):
        for place in cut.places(number, shape, shapes):
            width = full[place.tensor][1] if len(full[place.tensor]) > 1 else 1
            parts[place.tensor].append(Part(place.rows, place.columns or (0, width), ranks))
    return [(wide, merged(found)) for wide, found in zip(full, parts, strict=True)]


def merged(parts: Iterable[Part]) -> Pattern:
    """Neighbouring rows of the same columns that the same ranks hold become one part; equal parts of several become
    one."""
    who: dict[tuple[tuple[int, int], tuple[int, int]], set[int]] = {}
    for part in parts:
        who.setdefault((part.columns, part.rows), set()).update(part.who)
    found: list[Part] = []
    for (columns, rows), ranks in sorted(who.items()):
        part = Part(rows, columns, tuple(sorted(ranks)))
        last = found[-1] if found else None
        if last and last.columns == columns and last.rows[1] == rows[0] and last.who == part.who:
            found[-1] = Part((last.rows[0], rows[1]), columns, part.who)
        else:
            found.append(part)
    return tuple(found)


def needed_parts(shape: Shape, spans: Iterable[tuple[int, Sequence[Span], Span | None]]) -> Pattern:
    """What workers need of a tensor; spans: (worker, rows that it holds, its columns or None for all), as a manifest
    has them."""
    width = shape[1] if len(shape) > 1 else 1
    who: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
    for worker, rows, columns in spans:
        across = (columns[0], columns[0] + columns[1]) if columns is not None else (0, width)
        for start, length in rows:
            who.setdefault(((start, start + length), across), []).append(worker)
    return tuple(Part(rows, columns, tuple(workers)) for (rows, columns), workers in who.items())
