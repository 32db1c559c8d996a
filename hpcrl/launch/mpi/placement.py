"""Which MPI rank is on which host: a pure function of what every rank reports and of the hostfile.  The order of the
trainer's ranks over these hosts is `plan.py`'s.

Invariant: role order comes from the hostfile (line order, then slot), or without one from the ranks' order; every host
of the hostfile has a rank, and no two lines of it are one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcrl.errors import UsageError
from hpcrl.launch.probe import HostReport
from hpcrl.plan import Host


class Placement(NamedTuple):
    """Which rank is where.

    Attributes:
        names: the host of every rank, by the run's name for it, in rank order.
        hosts: in role order, without addresses.
    """

    names: tuple[str, ...]
    hosts: tuple[Host, ...]


def place_ranks(reports: Sequence[HostReport], hostfile: Sequence[Host] | None) -> Placement:
    """Place the ranks on the hosts that they reported.

    Args:
        reports: of every rank, in rank order.

    Raises:
        UsageError: names the host that does not fit.
    """
    machines = [report.hostname for report in reports]
    if many := [machine for machine in machines if machines.count(machine) > 1]:
        raise UsageError(
            f"host {many[0]} has {machines.count(many[0])} MPI ranks, and hpcrl starts the processes of a host itself",
            "start one MPI rank on each host (--map-by ppr:1:node, -ppn 1)",
        )
    if hostfile is not None:
        names = _names(reports, hostfile)
        return Placement(tuple(names[machine] for machine in machines), tuple(Host(h.name, h.slots) for h in hostfile))
    if bare := [report.hostname for report in reports if not report.gpus]:
        raise UsageError(
            f"host {bare[0]} shows no GPU, so the number of its slots is unknown",
            "give the hostfile: --hostfile FILE",
        )
    return Placement(tuple(machines), tuple(Host(report.hostname, report.gpus) for report in reports))


def _names(reports: Sequence[HostReport], hostfile: Sequence[Host]) -> dict[str, str]:
    """machine -> its name in the hostfile, found by name, by one of its addresses, or by short name."""
    known: dict[str, str] = {}
    short: dict[str, str] = {}
    for report in reports:
        for word in (report.hostname, *(network.address for network in report.networks)):
            known.setdefault(word, report.hostname)
        short.setdefault(report.hostname.split(".")[0], report.hostname)
    found: dict[str, str] = {}
    wrong: list[str] = []
    for host in hostfile:
        machine = known.get(host.name) or short.get(host.name.split(".")[0])
        if machine is None:
            wrong.append(f"host {host.name} of the hostfile runs no MPI rank")
        elif machine in found:
            raise UsageError(
                f"{found[machine]} and {host.name} of the hostfile are the same machine, {machine}",
                "list it once, with all its slots; does a name lead to the loopback?",
            )
        else:
            found[machine] = host.name
    machines = [report.hostname for report in reports]
    wrong += [f"{machine} is not in the hostfile" for machine in machines if machine not in found]
    if wrong:
        raise UsageError(
            f"{wrong[0]}; mpirun started ranks on {', '.join(machines)}",
            "give mpirun the same hosts, and -np for all of them",
        )
    return found
