"""How loads are divided: copies of a part among the ranks that hold them, and pieces into rounds that bound memory.

Invariants: `shares` comes to the least that the busiest rank can send, to a thousandth: of all ways to divide the bytes
of each set of copies among its ranks, the one with the smallest sum of squares also has the smallest maximum, and
giving each set in turn the best division given the others' leads there; in each round every rank sends and every host
receives at most `limit` bytes, counted with the gaps between pieces; a round is a run of neighbours in the order of the
pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SWEEPS = 300
CLOSE = 1e-4  #: of the busiest rank's bytes: what a last sweep may still change


def shares(sets: Sequence[tuple[int, ...]], amounts: np.ndarray, ranks: int) -> list[np.ndarray]:
    """For each set of ranks the bytes that each of its members sends.

    Args:
        amounts: bytes of each set.
    """
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
    """How an amount spreads over vessels that are as full as `levels`: the lowest rise together."""
    order = np.sort(levels)
    counts = np.arange(1, len(order) + 1)
    height = (amount + np.cumsum(order)) / counts  # if the lowest 1, 2, ... of them are filled
    high = height[np.flatnonzero(height > order)[-1]] if amount > 0 else order[0]
    return np.maximum(high - levels, 0.0)


ALIGN = 64  #: bytes: pieces begin at multiples of it


def padded(nbytes: np.ndarray) -> np.ndarray:
    """Bytes that pieces take in a buffer."""
    return -(-nbytes // ALIGN) * ALIGN


def divide(sizes: np.ndarray, sender: np.ndarray, destination: np.ndarray, limit: int) -> np.ndarray:
    """The round of each piece, int64 [pieces], from 0, never falling.

    Runs that are too large for any rank or host are halved until none is.

    Args:
        sizes: padded bytes, none above `limit`.
    """
    count = len(sizes)
    if not count:
        return np.zeros(0, dtype=np.int64)
    senders = int(sender.max()) + 1
    destinations = int(destination.max()) + 1
    busiest = max(np.bincount(sender, sizes).max(), np.bincount(destination, sizes).max())
    total = np.cumsum(sizes)
    runs = max(1, int(np.ceil(busiest / limit)))
    found = np.minimum((total - sizes) * runs // total[-1], runs - 1).astype(np.int64)
    while True:
        found = np.unique(found, return_inverse=True)[1].astype(np.int64)
        each = int(found[-1]) + 1
        sent = np.bincount(found * senders + sender, sizes, minlength=each * senders).reshape(each, senders).max(1)
        got = (
            np.bincount(found * destinations + destination, sizes, minlength=each * destinations)
            .reshape(each, destinations)
            .max(1)
        )
        large = np.maximum(sent, got) > limit
        if not large.any():
            return found
        begin = np.searchsorted(found, np.arange(each + 1))
        middle = (begin[:-1] + begin[1:]) // 2
        found = 2 * found + (large[found] & (np.arange(count) >= middle[found]))
