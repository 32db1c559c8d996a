"""Which copy of a part is sent: loads as even as the copies allow.

Invariant: `shares` comes to the least that the busiest rank can send, to a thousandth: of all ways to divide the bytes
of each set of copies among its ranks, the one with the smallest sum of squares also has the smallest maximum, and
giving each set in turn the best division beside the others' leads there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SWEEPS = 300
CLOSE = 1e-4  #: of the busiest rank's bytes: what a last sweep may still change


def shares(sets: Sequence[tuple[int, ...]], amounts: np.ndarray, ranks: int) -> list[np.ndarray]:
    """For each set of ranks the bytes that each of its members sends; amounts: bytes of each set."""
    found = [np.full(len(members), amount / len(members)) for members, amount in zip(sets, amounts, strict=True)]
    places = [np.asarray(members) for members in sets]
    load = np.zeros(ranks)
    for where, part in zip(places, found, strict=True):
        load[where] += part
    several = [i for i, members in enumerate(sets) if len(members) > 1]
    for _ in range(SWEEPS if several else 0):
        moved = 0.0
        for i in several:
            load[places[i]] -= found[i]
            filled = fill(load[places[i]], amounts[i])
            moved = max(moved, float(np.abs(filled - found[i]).max()))
            found[i] = filled
            load[places[i]] += filled
        if moved <= CLOSE * load.max():
            break
    return found


def fill(levels: np.ndarray, amount: float) -> np.ndarray:
    """How an amount spreads over vessels that stand as high as `levels`: the lowest rise together."""
    order = np.sort(levels)
    counts = np.arange(1, len(order) + 1)
    height = (amount + np.cumsum(order)) / counts  # if the lowest 1, 2, ... of them are filled
    high = height[np.flatnonzero(height > order)[-1]] if amount > 0 else order[0]
    return np.maximum(high - levels, 0.0)
