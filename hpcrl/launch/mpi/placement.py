"""Which MPI rank starts what: a pure function of what every rank reports and of the hostfile.  The
order of the trainer's ranks over these hosts is `plan.py`'s.

Invariant: role order comes from the hostfile (line order, then slot), or without one from the ranks' order; every host
of the hostfile has a rank, and no two lines of it are one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from hpcrl.errors import UsageError
from hpcrl.launch.probe import HostReport
from hpcrl.plan import Host


class RankPlace(msgspec.Struct, frozen=True):
    """One MPI rank and the host that it is on, by the run's name for it."""

    rank: int
    host: str


class Placement(msgspec.Struct, frozen=True):
    """Which rank is where.

    Attributes:
        places: in rank order.
        hosts: in role order, without addresses.
    """

    places: tuple[RankPlace, ...]
    hosts: tuple[Host, ...]

    def first(self, host: str) -> int:
        """The rank of a host."""
        return next(place.rank for place in self.places if place.host == host)


def place_ranks(reports: Sequence[HostReport], gpus: Sequence[int], hostfile: Sequence[Host] | None) -> Placement:
    """Place the ranks on the hosts that they reported.

    Args:
        reports, gpus: of every rank, in rank order (GPUs of its host).

    Raises:
        UsageError: names the host that does not fit.
    """
    machines = list(dict.fromkeys(report.hostname for report in reports))
    counts = Counter(report.hostname for report in reports)
    if many := [machine for machine in machines if counts[machine] > 1]:
        raise UsageError(
            f"host {many[0]} has {counts[many[0]]} MPI ranks, and hpcrl starts the processes of a host itself",
            "start one MPI rank on each host (--map-by ppr:1:node, -ppn 1)",
        )
    names = _names(machines, reports, hostfile)
    if hostfile is not None:
        hosts = [Host(h.name, h.slots) for h in hostfile]
    else:
        hosts = [Host(names[m], gpus[next(i for i, r in enumerate(reports) if r.hostname == m)]) for m in machines]
        if bare := [host.name for host in hosts if not host.slots]:
            raise UsageError(
                f"host {bare[0]} shows no GPU, so the number of its slots is unknown",
                "give the hostfile: --hostfile FILE",
            )
    places = [RankPlace(rank, names[report.hostname]) for rank, report in enumerate(reports)]
    return Placement(tuple(places), tuple(hosts))


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
