"""The order of the pieces, and rounds that bound memory: in one round nobody sends or receives more than a limit.

Invariant: whatever the pieces, in each round every rank sends and every host receives at most `limit` bytes, counted
with the gaps between pieces; a round is a run of neighbours in the order of the pieces.
"""

from __future__ import annotations

import numpy as np

ALIGN = 64  #: bytes: pieces begin at multiples of it


def padded(nbytes: np.ndarray) -> np.ndarray:
    """Bytes that pieces take in a buffer."""
    return -(-nbytes // ALIGN) * ALIGN


def divide(sizes: np.ndarray, sender: np.ndarray, landing: np.ndarray, limit: int) -> np.ndarray:
    """The round of each piece, int64 [pieces], from 0, never falling; sizes: padded bytes, none above `limit`.

    Runs that are too large for somebody are halved until none is.
    """
    count = len(sizes)
    if not count:
        return np.zeros(0, dtype=np.int64)
    senders, landings = int(sender.max()) + 1, int(landing.max()) + 1
    busiest = max(np.bincount(sender, sizes).max(), np.bincount(landing, sizes).max())
    total = np.cumsum(sizes)
    runs = max(1, int(np.ceil(busiest / limit)))
    found = np.minimum((total - sizes) * runs // total[-1], runs - 1).astype(np.int64)
    while True:
        found = np.unique(found, return_inverse=True)[1].astype(np.int64)
        each = int(found[-1]) + 1
        sent = np.bincount(found * senders + sender, sizes, minlength=each * senders).reshape(each, senders).max(1)
        got = np.bincount(found * landings + landing, sizes, minlength=each * landings).reshape(each, landings).max(1)
        large = np.maximum(sent, got) > limit
        if not large.any():
            return found
        begin = np.searchsorted(found, np.arange(each + 1))
        middle = (begin[:-1] + begin[1:]) // 2
        found = 2 * found + (large[found] & (np.arange(count) >= middle[found]))
