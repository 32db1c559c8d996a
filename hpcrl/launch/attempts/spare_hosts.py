"""Which host of a job takes the place of one that is lost or broken.  Pure.

Invariants: a spare host is used by no plan until it has taken another's place; it takes it in the order of hosts, with
as many slots, so that every other host keeps its ranks and engines; a host that was left out is never used again in
this job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from hpcrl.plan import Host


def mark_spares(hosts: Sequence[Host], count: int) -> list[Host]:
    """The hosts, the last `count` of those with slots marked as spare."""
    with_slots = [host.name for host in hosts if host.slots]
    spare = set(with_slots[len(with_slots) - count :]) if count else set[str]()
    return [msgspec.structs.replace(host, spare=host.name in spare) for host in hosts]


def replacement(hosts: Sequence[Host], name: str) -> Host | None:
    """The spare host that would take the place of this one: the first with as many slots, or with more; None if there
    is none, or nothing to take the place of."""
    lost = next((host for host in hosts if host.name == name), None)
    if lost is None or lost.spare:
        return None
    able = [host for host in hosts if host.spare and host.slots >= lost.slots]
    return next((host for host in able if host.slots == lost.slots), able[0] if able else None)


def in_order(hosts: Sequence[Host], names: Iterable[str]) -> list[str]:
    """Names of hosts that are to be left out, spare ones first: they are to take no place before."""
    spare = {host.name for host in hosts if host.spare}
    return sorted(names, key=lambda name: name not in spare)


def without(hosts: Sequence[Host], names: Iterable[str]) -> list[Host]:
    """The hosts without these, in order: a spare, as long as there is one, takes the place of a lost host."""
    left = list(hosts)
    for name in names:
        found = replacement(left, name)
        lost = next((host for host in left if host.name == name), None)
        if found is not None and lost is not None:
            left.remove(found)
            left[left.index(lost)] = msgspec.structs.replace(found, slots=lost.slots, spare=False)
        elif lost is not None:
            left.remove(lost)
    return left
