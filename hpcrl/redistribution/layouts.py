"""Both sides of a weight update as numbers: which rectangles of each tensor every trainer rank holds and every worker
needs.

    layouts = Layouts()
    held = layouts.pattern([TensorPart((0, 4), (0, 8), (0, 2)),          # two halves, two copies of each
                            TensorPart((4, 8), (0, 8), (1, 3))])
    layouts.add("model.norm.weight", (8, 8), 2, held, needed)

A large model has tens of thousands of tensors and few patterns, so a tensor refers to its pattern by number.

Invariants: a tensor has two dimensions, (rows, columns), a vector (length, 1); the parts that are held of one are
disjoint and together are the whole; a part that is needed lies inside it; what a rank holds is what
`hpcrl.models.slicing` cuts for it: nothing here knows a kind of cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpcrl.models.slicing import CUTS, Shape, Shapes

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
        """One more tensor of one or two dimensions; item: bytes of an element as it is sent."""
        self.names.append(name)
        self.shapes.append((shape[0], shape[1] if len(shape) > 1 else 1))
        self.items.append(item)
        self.held.append(held)
        self.needed.append(needed)


def whole(shape: tuple[int, ...], who: Iterable[int]) -> TensorPart:
    """All of a tensor."""
    return TensorPart((0, shape[0]), (0, shape[1] if len(shape) > 1 else 1), tuple(who))


Span = Sequence[int]  #: (start, length)


def held_parts(
    kind: str, shape: Shape, shapes: Shapes, copies: Sequence[tuple[int, ...]]
) -> list[tuple[Shape, Pattern]]:
    """(shape, who holds which part) of each tensor of a rule of `kind`.

    shape: of one rank's part of the parameter.
    copies: for each part, in order of TP (of an expert's: ETP) rank, the ranks that hold it.
    """
    cut = CUTS[kind]
    full = cut.full(shape, shapes)
    parts: list[list[TensorPart]] = [[] for _ in full]
    for number, ranks in enumerate(copies):
        for place in cut.places(number, shape, shapes):
            width = full[place.tensor][1] if len(full[place.tensor]) > 1 else 1
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


def needed_parts(shape: Shape, spans: Iterable[tuple[int, Sequence[Span], Span | None]]) -> Pattern:
    """What workers need of a tensor; spans: (worker, rows that it holds, its columns or None for all), as a manifest
    has them."""
    width = shape[1] if len(shape) > 1 else 1
    who: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
    for worker, rows, columns in spans:
        across = (columns[0], columns[0] + columns[1]) if columns is not None else (0, width)
        for start, length in rows:
            who.setdefault(((start, start + length), across), []).append(worker)
    return tuple(TensorPart(rows, columns, tuple(workers)) for (rows, columns), workers in who.items())
