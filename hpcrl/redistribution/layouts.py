"""Both sides of a weight update as numbers: which rectangles of each tensor every trainer rank holds and every worker
needs.

    layouts = Layouts()
    held = layouts.pattern([Part((0, 4), (0, 8), (0, 2)), Part((4, 8), (0, 8), (1, 3))])     # two halves, two copies of each
    layouts.add("model.norm.weight", (8, 8), 2, held, needed)

A large model has tens of thousands of tensors and few patterns, so a tensor names its pattern by number.

Invariants: a tensor has two dimensions, (rows, columns), a vector (length, 1); the parts that are held of one are
disjoint and together are the whole; a part that is needed lies inside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Segment = tuple[int, int]  #: [start, end)


@dataclass(frozen=True)
class Part:
    """One rectangle of a tensor, and the numbers of those who hold (ranks) or need (workers) it."""

    rows: Segment
    columns: Segment
    who: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it."""
        return self.rows[0] >= self.rows[1] or self.columns[0] >= self.columns[1]


Pattern = tuple[Part, ...]


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

    def pattern(self, parts: Iterable[Part]) -> int:
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


def whole(shape: tuple[int, ...], who: Iterable[int]) -> Part:
    """All of a tensor."""
    return Part((0, shape[0]), (0, shape[1] if len(shape) > 1 else 1), tuple(who))
