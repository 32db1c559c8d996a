"""What a file of a kind has, and what it is told of this node.

Invariant: a file of a kind is imported by processes that make boxes of it alone: every box holds what its spawner has
imported.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple, Protocol, cast

from hpcrl.sandbox.limits import BoxLimits


class ContainerKind(NamedTuple):
    """A kind, and what its boxes are made of on this node.

    Attributes:
        name: of its file.
        program: its path.
        runtime: directory of the first process's Python.
        system: an empty root, with places for the machine's directories.
        sized: it bounds each place that can be written to by itself.
        state: a directory for what the program itself writes.
    """

    name: str
    program: str
    runtime: str
    system: str
    sized: bool
    state: str


class KindModule(Protocol):
    """What a file of a kind has."""

    PROGRAMS: tuple[str, ...]

    def start_words(self, kind: ContainerKind, image: str, limits: BoxLimits, command: list[str]) -> list[str]:
        """The command line that runs `command` as process 1 of a container.

        Args:
            image: an unpacked root, or "" for the machine's own directories.
        """
        ...

    def is_sized(self, program: str) -> bool:
        """See `ContainerKind.sized`."""
        ...


def module_of(name: str) -> KindModule:
    """The file of a kind that is not ours."""
    return cast(KindModule, importlib.import_module(f"hpcrl.sandbox.kinds.{name}"))
