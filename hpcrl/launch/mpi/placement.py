"""Which MPI rank starts what: a pure function of what every rank reports and of the hostfile.  The
order of the trainer's ranks over these hosts is `plan.py`'s.

Invariant: role order comes from the hostfile (line order, then slot), or without one from the ranks' order; every host
of the hostfile has a rank, and no two lines of it are one machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hpcrl.errors import UsageError
from hpcrl.launch.probe import HostReport
from hpcrl.plan import Host


class RankPlace(msgspec.Struct, frozen=True):
    """One MPI rank: the host it is on (by the run's name for it) and its number among the ranks there."""

    rank: int
    host: str
    local: int


class Placement(msgspec.Struct, frozen=True):
    """Which rank is where.

    Attributes:
        places: in rank order.
        hosts: in role order, without addresses.
        per_slot: a rank for each slot, not one for each host.
    """

    places: tuple[RankPlace, ...]
    hosts: tuple[Host, ...]
    per_slot: bool

    def first(self, host: str) -> int:
        """The rank that speaks for a host."""
        return next(place.rank for place in self.places if place.host == host and place.local == 0)


def place_ranks(reports: Sequence[HostReport], gpus: Sequence[int], hostfile: Sequence[Host] | None) -> Placement:
    """Place the ranks on the hosts that they reported.

    Args:
        reports, gpus: of every rank, in rank order (GPUs of its host).

    Raises:
        UsageError: names the host that does not fit.
    """
    machines = list(dict.fromkeys(report.hostname for report in reports))
    counts = {machine: sum(r.hostname == machine for r in reports) for machine in machines}
    if hostfile is None and len(set(counts.values())) > 1 and 1 in counts.values():
        few = next(machine for machine, count in counts.items() if count == 1)
        raise UsageError(
            f"host {few} runs one MPI rank, others more", "start one a host (--map-by ppr:1:node, -ppn 1) or one a slot"
        )
    names = _names(machines, reports, hostfile)
    per_slot = max(counts.values()) > 1
    if hostfile is not None:
        hosts = [Host(h.name, h.slots) for h in hostfile]
    elif per_slot:
        hosts = [Host(names[m], counts[m]) for m in machines]
    else:
        hosts = [Host(names[m], gpus[next(i for i, r in enumerate(reports) if r.hostname == m)]) for m in machines]
        if bare := [host.name for host in hosts if not host.slots]:
            raise UsageError(
                f"host {bare[0]} shows no GPU, so its slots are not known", "give the hostfile: --hostfile FILE"
            )
    if per_slot:
        _check_slots(hosts, {names[m]: n for m, n in counts.items()})
    seen: dict[str, int] = {}
    places = []
    for rank, report in enumerate(reports):
        name = names[report.hostname]
        places.append(RankPlace(rank, name, seen.get(name, 0)))
        seen[name] = seen.get(name, 0) + 1
    return Placement(tuple(places), tuple(hosts), per_slot)


def _check_slots(hosts: Sequence[Host], counts: dict[str, int]) -> None:
    for host in hosts:
        if counts[host.name] != max(1, host.slots):  # a host without slots still runs the rollout process
            raise UsageError(
                f"host {host.name} has {host.slots} slots and {counts[host.name]} MPI ranks",
                "start one rank a host (--map-by ppr:1:node, -ppn 1), or as many as it has slots",
            )


def _names(machines: Sequence[str], reports: Sequence[HostReport], hostfile: Sequence[Host] | None) -> dict[str, str]:
    """machine -> its name in the hostfile, found by name, by short name, or by one of its addresses."""
    if hostfile is None:
        return {machine: machine for machine in machines}
    by_machine = {report.hostname: report for report in reports}
    found: dict[str, str] = {}
    for host in hostfile:
        for machine in machines:
            addresses = {network.address for network in by_machine[machine].networks}
            if host.name in {machine, *addresses} or host.name.split(".")[0] == machine.split(".")[0]:
                if machine in found:
                    raise UsageError(
                        f"{found[machine]} and {host.name} of the hostfile are the same machine, {machine}",
                        "list it once, with all its slots; does a name lead to the loopback?",
                    )
                found[machine] = host.name
                break
    missing = [host.name for host in hostfile if host.name not in found.values()]
    strange = [machine for machine in machines if machine not in found]
    if missing or strange:
        what = (
            f"host {missing[0]} of the hostfile runs no MPI rank" if missing else f"{strange[0]} is not in the hostfile"
        )
        has = ", ".join(machines)
        raise UsageError(
            f"{what}; mpirun started ranks on {has}", "give mpirun the same hosts, and -np for all of them"
        )
    return found
