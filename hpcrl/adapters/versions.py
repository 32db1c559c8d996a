"""How the weights of an engine are named: by the policy version of every adapter that it holds.

    17        of a run of one policy
    3.0.12    of three adapters, in the order of their slots

An engine says with every token which weights it was sampled under; the version of the adapter that sampled it is one
of those numbers.  Invariant: pure functions; a name that is none of these is a ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence


def name_of(versions: Sequence[int]) -> str:
    """What engines are told."""
    return ".".join(map(str, versions))


def version_in(name: str, slot: int | None) -> int:
    """The policy version of the adapter in `slot`; of the one policy (None).

    Raises:
        ValueError: for a name that the trainer has given to no weights.
    """
    parts = name.split(".")
    if (slot is None and len(parts) > 1) or (slot is not None and slot >= len(parts)) or not all(map(_number, parts)):
        raise ValueError(name)
    return int(parts[slot or 0])


def _number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
