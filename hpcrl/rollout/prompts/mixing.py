"""The order of an epoch: pure functions of sizes, weights, seed and the epoch's number.

Invariant: without weights every prompt comes once in an epoch, in slime's order if it is shuffled.  With weights an
epoch is as long as all files together and holds each file's share of it; a file goes through all of its prompts before
one of them comes again, across epochs.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import numpy as np

from hpcrl.errors import DataError


def epoch_order(count: int, parts: Sequence[tuple[int, float]], seed: int, epoch: int, shuffle: bool) -> Sequence[int]:
    """The prompts of an epoch, by number.  parts: (prompts, weight) of each file of a mixture, which lie one after
    another."""
    if not parts:
        return _permutation(count, seed + epoch, shuffle)
    taken = shares(count, [weight for _, weight in parts])
    slots = _slots(taken, seed + epoch, shuffle)
    order = np.zeros(count, np.int64)
    first = 0
    for number, ((size, _), share) in enumerate(zip(parts, taken, strict=True)):
        order[slots == number] = first + _walk(size, epoch * share, share, f"{seed}/{number}", shuffle)
        first += size
    return array("q", order.tobytes())


def shares(count: int, weights: Sequence[float]) -> list[int]:
    """`count` divided in proportion to `weights`, to whole numbers by the largest remainder.  DataError if one gets
    none."""
    exact = [count * weight / sum(weights) for weight in weights]
    found = [int(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (found[i] - exact[i], i))
    for i in by_remainder[: count - sum(found)]:
        found[i] += 1
    if 0 in found:
        i = found.index(0)
        raise DataError(
            f"the weight {weights[i]:g} of --prompt-data gives none of an epoch's {count} prompts", "raise it"
        )
    return found


def _permutation(count: int, seed: int | str, shuffle: bool) -> array[int]:
    """Python's shuffle of 0 ... count - 1."""
    order = array("q", range(count))
    if shuffle:
        random.Random(seed).shuffle(order)  # type: ignore[arg-type]
    return order


def _slots(taken: Sequence[int], seed: int, shuffle: bool) -> np.ndarray:
    """int64 [sum of `taken`]: which file each place of the epoch belongs to, shuffled, or spread evenly."""
    files = np.repeat(np.arange(len(taken)), taken)
    if shuffle:
        return files[np.asarray(_permutation(len(files), f"{seed}/files", True))]
    places = np.concatenate([(np.arange(n) + 0.5) / n for n in taken])
    return files[np.lexsort((files, places))]


def _walk(size: int, start: int, count: int, seed: str, shuffle: bool) -> np.ndarray:
    """int64 [count]: the prompts `start` ... of a walk that goes through all `size` of a file again and again."""
    found = []
    while count:
        again, offset = divmod(start, size)
        here = np.asarray(_permutation(size, f"{seed}/{again}", shuffle), np.int64)[offset : offset + count]
        found.append(here)
        start, count = start + len(here), count - len(here)
    return np.concatenate(found)
