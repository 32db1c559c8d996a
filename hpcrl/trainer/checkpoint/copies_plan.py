"""Which host keeps whose copy in memory, and which step can be had from what was found there.  Pure.

Invariants: a rank's second copy is on another host wherever there is more than one; a step is complete only if every
rank's part of it was found, all written by the same attempt; every rank comes to the same answers, from what all know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

Step = tuple[int, int, int, int]  #: rollouts done, attempt, policy version, ranks


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's part of a copy in memory: its index.json.

    Attributes:
        rollout_id: rollouts that were done.
        version: optimizer steps that were done.
        attempt: of the run that wrote it.
        world: how many ranks wrote one.
        files: name -> size and CRC-32.
    """

    run_id: str
    rollout_id: int
    version: int
    attempt: int
    rank: int
    world: int
    files: dict[str, tuple[int, int]]

    @property
    def step(self) -> Step:
        """What parts of one copy have in common; the newest is the greatest."""
        return self.rollout_id, self.attempt, self.version, self.world


def partners(hosts: Sequence[str]) -> list[int | None]:
    """Of each rank the one that keeps its second copy: on the next host the one in the same place; None on one host.

    Args:
        hosts: of each rank, in rank order.
    """
    ranks_on: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_on.setdefault(host, []).append(rank)
    if len(ranks_on) < 2:
        return [None] * len(hosts)
    names = list(ranks_on)
    following = {name: ranks_on[names[(number + 1) % len(names)]] for number, name in enumerate(names)}
    return [following[host][ranks_on[host].index(rank) % len(following[host])] for rank, host in enumerate(hosts)]


def senders(hosts: Sequence[str], rank: int) -> list[int]:
    """The ranks whose second copy `rank` keeps."""
    return [other for other, partner in enumerate(partners(hosts)) if partner == rank]


def share(places: Sequence[tuple[str, str]], rank: int) -> tuple[int, int]:
    """(number, count) of `rank` among those that see the same copies.

    Args:
        places: of each rank its host and the directory of copies there.
    """
    same = [other for other, place in enumerate(places) if place == places[rank]]
    return same.index(rank), len(same)


@dataclass(frozen=True)
class CompleteStep:
    """A step whose parts were all found.

    Attributes:
        step: `Part.step` of its parts.
        holders: of each part, in the order of the ranks that wrote them, the rank that has found it.
    """

    step: Step
    holders: tuple[int, ...]

    def parts_from(self, holder: int, parts: Sequence[Part]) -> list[Part]:
        """Those of its parts that `holder` is to bring, out of what it has found."""
        return [part for part in parts if part.step == self.step and self.holders[part.rank] == holder]


def newest_complete(found: Sequence[Sequence[Part]]) -> CompleteStep | None:
    """The newest step of which every part was found whole; None if there is none.

    Args:
        found: of each rank that looked, the parts that it has found whole.
    """
    known: dict[Step, dict[int, list[int]]] = {}
    for holder, parts in enumerate(found):
        for part in parts:
            known.setdefault(part.step, {}).setdefault(part.rank, []).append(holder)
    complete = [step for step, parts in known.items() if set(parts) == set(range(step[-1]))]
    if not complete:
        return None
    step = max(complete)
    load = [0] * len(found)
    holders = []
    for rank in range(step[-1]):
        holder = min(known[step][rank], key=lambda one: (load[one], one))
        load[holder] += 1
        holders.append(holder)
    return CompleteStep(step, tuple(holders))
