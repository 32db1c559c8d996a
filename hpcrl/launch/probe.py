"""What a host knows of itself, and the network that the hosts of a run share.

    python -m hpcrl.launch.probe RUN --attempt N --host NAME      one task a host, before the plan is made

Invariants: an address is one that the host itself has and no other host of the run has; it is never taken from a name
that was resolved; where several networks would do, none is guessed.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from hpcrl.errors import DeadlineError, UsageError
from hpcrl.run.peers import PublishedRecords, read_published
from hpcrl.run.rundir import RunDir, listed, write_atomic
from hpcrl.utils.waiting import Deadline

MEND = "name the network with --interface, or interface = in the site's profile"


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One address of one interface.

    Attributes:
        speed: Mbit/s as the driver says it, 0 if it does not.
    """

    interface: str
    address: str
    prefix: int
    speed: int

    @property
    def subnet(self) -> str:
        return str(ipaddress.ip_interface(f"{self.address}/{self.prefix}").network)


class HostReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host's own view.

    Attributes:
        sees: whether the run directory's token is there.
        time: of its clock, in Unix seconds.
        gpus: devices of NVIDIA's driver.
    """

    host: str
    hostname: str
    networks: tuple[Network, ...]
    sees: bool
    time: float
    cpus: int
    memory: int
    gpus: int = 0


def host_report(host: str, token: Path | None = None) -> HostReport:
    """This host's report; `host` is the name that the run knows it by."""
    return HostReport(
        host=host,
        hostname=socket.gethostname(),
        networks=tuple(networks()),
        sees=token is None or token.exists(),
        time=time.time(),
        cpus=len(os.sched_getaffinity(0)),
        memory=psutil.virtual_memory().available,
        gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))),
    )


def networks() -> list[Network]:
    """Addresses of interfaces that are up, the loopback left out; IPv6 only where an interface has no IPv4."""
    found, stats = [], psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name not in stats or not stats[name].isup:
            continue
        ours = [
            _network(name, a, stats[name].speed) for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)
        ]
        usable = [n for n in ours if n is not None]
        v4 = [n for n in usable if "." in n.address]
        found += v4 or usable
    return found


def _network(name: str, entry: Any, speed: int) -> Network | None:
    address = ipaddress.ip_address(entry.address.partition("%")[0])
    if address.is_loopback or address.is_link_local or not entry.netmask:
        return None
    prefix = bin(int(ipaddress.ip_address(entry.netmask))).count("1")
    return Network(name, str(address), prefix, max(speed, 0))


# ---- one network for all


def choose(reports: Mapping[str, HostReport], interface: str | None = None, apart: bool = False) -> dict[str, Network]:
    """host -> the address that its processes listen on.

    With one host it is the loopback: nothing leaves the host.

    Args:
        interface: a name, or the beginning of one.
        apart: whether others than these hosts are to reach them.

    Raises:
        UsageError: names hosts and networks where none or several would do.
    """
    if interface:
        return {host: _named(found, interface) for host, found in reports.items()}
    if len(reports) == 1 and not apart:
        return {host: Network("lo", "127.0.0.1", 8, 0) for host in reports}
    for key in ("subnet", "interface"):
        shared = {name: chosen for name in _keys(reports, key) if (chosen := _all_on(reports, key, name))}
        if len(shared) > 1:
            host = next(iter(reports))
            names = ", ".join(f"{chosen[host].interface} ({name})" for name, chosen in sorted(shared.items()))
            raise UsageError(f"the hosts share {len(shared)} networks, on {host}: {names}", MEND)
        if shared:
            return next(iter(shared.values()))
    reported = {
        host: ", ".join(f"{n.interface} {n.address}" for n in r.networks) or "none" for host, r in reports.items()
    }
    raise UsageError(
        "the hosts share no network: " + "; ".join(f"{host} has {text}" for host, text in list(reported.items())[:4]),
        "a host that only has a loopback interface needs an address; otherwise " + MEND,
    )


def _keys(reports: Mapping[str, HostReport], key: str) -> list[str]:
    """Subnets, or interface names, of the first host."""
    return list(dict.fromkeys(getattr(n, key) for n in next(iter(reports.values())).networks))


def _all_on(reports: Mapping[str, HostReport], key: str, value: str) -> dict[str, Network] | None:
    """Each host's network of that subnet (or interface), if every host has one, with its own address."""
    found = {host: next((n for n in r.networks if getattr(n, key) == value), None) for host, r in reports.items()}
    addresses = [n.address for n in found.values() if n is not None]
    if len(addresses) < len(reports) or len(set(addresses)) < len(addresses):
        return None  # not everywhere; or a bridge that has the same address on every host
    return {host: n for host, n in found.items() if n is not None}


def _named(found: HostReport, interface: str) -> Network:
    exact = [n for n in found.networks if n.interface == interface] or [
        n for n in found.networks if n.interface.startswith(interface)
    ]
    if interface == "lo":
        return Network("lo", "127.0.0.1", 8, 0)
    if len(exact) != 1:
        have = ", ".join(dict.fromkeys(n.interface for n in found.networks)) or "none but the loopback"
        raise UsageError(f"host {found.host}: {len(exact) or 'no'} interfaces fit {interface}; it has {have}", MEND)
    return exact[0]


# ---- as a step of a job


def write(rundir: RunDir, host: str) -> None:
    """Put this host's report where the launcher waits for it."""
    found = host_report(host, rundir.here)
    write_atomic(rundir.here / "hosts" / f"{host}.json", msgspec.json.encode(found))


def gather(
    rundir: RunDir, hosts: list[str], seconds: float, check: Callable[[], None] = lambda: None, lacks: int = 0
) -> dict[str, HostReport]:
    """Every host's report.

    Args:
        lacks: how many hosts may give none.

    Raises:
        DeadlineError: names the hosts that did not answer, if they are more; `check` may give up before.
    """
    reports = PublishedRecords(rundir.here / "hosts", HostReport)
    reports.wait(hosts, Deadline(seconds), 0.1, check)
    for host in reports.damaged:
        if found := read_published(rundir.here / "hosts" / f"{host}.json", HostReport):  # or PeerError
            reports.found[host] = found
    silent = [host for host in hosts if host not in reports.found]
    if len(silent) > lacks:
        raise DeadlineError(
            f"no answer from {', '.join(silent)} within {seconds:.0f} s",
            f"is the host up, and does it see {rundir.root} (a file system that all hosts share)?",
        )
    return {host: reports.found[host] for host in hosts if host in reports.found}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Report this host to the launcher.")
    parser.add_argument("run")
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--host", required=True)
    args = parser.parse_args(argv)
    rundir = RunDir(args.run, args.attempt)
    if rundir.here.name not in listed(rundir.here.parent):
        print(
            f"hpcrl: error: host {args.host} does not see {rundir.here}: do all hosts share that file system?",
            file=sys.stderr,
        )
        return 1
    write(rundir, args.host)
    return 0


if __name__ == "__main__":
    sys.exit(main())
