"""Which pairs of a group's ranks are proved when the group is made, and in which order.

A group that connects when it is made is proved whole.  Of one that connects when needed, up to WHOLE ranks are; in a
larger one these are the pairs that gloo's collectives use: neighbours in the ring (all-reduce, all-gather,
reduce-scatter), distances of powers of two (broadcast, barrier), and rank 0 with every other (gather, scatter and
reduce to it).

Invariant: pure and symmetric: two ranks agree on whether they are a pair, and come to it in the same step.
"""

from __future__ import annotations

WHOLE = 64  #: ranks


def proved_peers(rank: int, size: int, whole: bool) -> list[int]:
    """The peers of `rank`, in order.

    Args:
        whole: whether every pair is connected anyway.
    """
    rounds = ((step - rank) % size for step in range(size))  # in round `step` all pairs with this sum meet
    return [peer for peer in rounds if peer != rank and (whole or is_proved(rank, peer, size))]


def is_proved(one: int, other: int, size: int) -> bool:
    """Whether two different ranks are proved as a pair when a group that connects when needed is made."""
    if size <= WHOLE or 0 in (one, other):
        return True
    distance = (one - other) % size
    return any(far & (far - 1) == 0 for far in (distance, size - distance))
