"""What tells the base of an adapter from another: the same in every layout, and in a file.

Invariant: two sums of every tensor are all that it is made of, so that ranks that hold parts of one add theirs up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


BAND = 1 << 24  #: numbers that are looked at once


class BitSums(NamedTuple):
    """The sum of the patterns of all numbers as fp32, read as int32, and that of their squares, both modulo 2^64."""

    plain: int
    squares: int

    def __str__(self) -> str:
        return f"{self.plain} {self.squares}"


def bit_sums(part: torch.Tensor) -> BitSums:
    """Of a tensor, or of a part of one."""
    import torch

    sums = torch.zeros(2, dtype=torch.int64, device=part.device)
    for band in part.reshape(-1).split(BAND):  # of which wide copies are made
        bits = band.float().view(torch.int32).to(torch.int64)
        sums += torch.stack([bits.sum(), (bits * bits).sum()])
    return BitSums(*sums.tolist())


def digest_of(lines: Iterable[str]) -> str:
    """Of a line for each tensor, in the order of their names: "NAME SUMS"; hex."""
    return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()
