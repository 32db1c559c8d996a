"""What the nodes report, and what it means: pure functions of their reports.

Invariant: `judge` speaks of every host at least once, and of what could not be looked at as well as of what is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from hostlist import BadHostlist, collect_hostlist

from hpcrl.errors import UsageError
from hpcrl.launch.probe import HostReport, choose
from hpcrl.utils.check_results import Finding, Level, count, size

SKEW = 1.0  #: seconds that two clocks may differ by
FREE = 0.9  #: the part of a GPU's memory that should be free before a run
GIB = 1 << 30
SHM = GIB  #: bytes of /dev/shm that vLLM and the weight transfer between processes of a host should find


class Gpu(msgspec.Struct, frozen=True):
    """A GPU as the driver shows it; memory in MiB."""

    index: int
    name: str
    total: int
    free: int


class NodeReport(msgspec.Struct, frozen=True):
    """What one node found.

    Attributes:
        base: host, networks, memory.
        wrote: why its file could not be written, "" if it could.
        seen: hosts whose files it saw.
        unreached: why it could not connect to the first node, or bind the first node's port; "" if it could, None where
            that was not tried.
        gpus: None where no driver answers, with `devices` then counted from /dev.
        visible: CUDA_VISIBLE_DEVICES.
        shm: bytes free in /dev/shm.
        findings: of what the run needs there (gpu_needs.py).
        locked: bytes that a process may lock, None for no limit where that matters.
    """

    base: HostReport
    role: str = ""
    wrote: str = ""
    seen: tuple[str, ...] = ()
    unreached: str | None = None
    gpus: tuple[Gpu, ...] | None = None
    devices: int = 0
    visible: str | None = None
    shm: int = 0
    locked: int | None = None
    versions: dict[str, str] = {}
    findings: tuple[Finding, ...] = ()

    @property
    def host(self) -> str:
        return self.base.host

    @property
    def gpu_count(self) -> int:
        """GPUs that a process here would get: those that Slurm made visible, else those of the driver, else those of
        /dev."""
        if self.visible is not None:
            return len([name for name in self.visible.split(",") if name and name != "NoDevFiles"])
        return len(self.gpus) if self.gpus is not None else self.devices


def judge_reports(
    reports: Sequence[NodeReport],
    wanted: Mapping[str, int] | None = None,
    interface: str | None = None,
    window: tuple[float, float] | None = None,
    expected: int | None = None,
    memory: Mapping[str, float] | None = None,
) -> list[Finding]:
    """What the reports say.

    Args:
        wanted: GPUs a node, by role.
        interface: as the site names it.
        window: our clock (Unix seconds) when the first node was asked and when the last had answered.
        expected: how many nodes were asked.
        memory: bytes that a host needs, by role.
    """
    if not reports:
        return [Finding("fail", "", f"none of {expected or 'the'} nodes reported", "see the step's log")]
    findings = [*_answered(reports, expected), *_directory(reports)]
    if known := [report for report in reports if report.base.sees]:  # of the others no more than that is known
        findings += [*_network(known, interface), *_reach(known)]
        findings += [*_clocks(known, window), *_versions(known), *_gpus(known, wanted or {})]
        findings += _rest(known, memory or {})
    wrong = {finding.host for finding in findings if finding.level != "ok"}
    findings += [Finding("ok", report.host, _shown(report)) for report in reports if report.host not in wrong]
    return merge(findings)


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """The same thing on several hosts is one line: node[1-8]."""
    together: dict[tuple[Level, str, str], list[str]] = {}
    for finding in findings:
        together.setdefault((finding.level, finding.what, finding.hint), []).append(finding.host)
    return [Finding(level, _fold(hosts), what, hint) for (level, what, hint), hosts in together.items()]


def _fold(hosts: list[str]) -> str:
    named = dict.fromkeys(host for host in hosts if host)
    try:
        return collect_hostlist(list(named))
    except BadHostlist:
        return ",".join(named)


def _shown(report: NodeReport) -> str:
    gpus = count(report.gpu_count, "GPU") + (f" ({report.gpus[0].name})" if report.gpus else "")
    role = f"{report.role}, " if report.role else ""
    return f"{role}{report.base.cpus} CPUs, {size(report.base.memory // GIB * GIB)} free, {gpus}"


def _answered(reports: Sequence[NodeReport], expected: int | None) -> Iterator[Finding]:
    for host, times in Counter(report.host for report in reports).items():
        if times > 1:
            yield Finding("fail", host, f"it sent {times} reports", "one task a node: see the site's srun and launcher")
    if expected is not None and len(reports) < expected:
        came = ", ".join(report.host for report in reports)
        yield Finding(
            "fail", "", f"{len(reports)} of {expected} nodes reported ({came})", "see the step's log for the others"
        )


def _directory(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Each node saw our token, wrote its own file, and saw everybody's."""
    hosts = {report.host for report in reports if report.base.sees and not report.wrote}
    fine = True
    hint = "choose a --run-dir on a file system that all nodes share"
    for report in reports:
        missing = sorted(hosts - {*report.seen})
        if not report.base.sees:
            yield Finding("fail", report.host, "it does not see the run directory", hint)
        elif report.wrote:
            yield Finding("fail", report.host, f"it cannot write to the run directory: {report.wrote}", hint)
        elif missing:
            yield Finding(
                "fail", report.host, f"in the run directory it does not see the file of {', '.join(missing)}", hint
            )
        else:
            continue
        fine = False
    if fine:
        yield Finding("ok", "", f"all {len(reports)} nodes see one run directory, and each other's files in it")


def _network(reports: Sequence[NodeReport], interface: str | None) -> Iterator[Finding]:
    try:
        chosen = choose({report.host: report.base for report in reports}, interface)
    except UsageError as error:
        yield Finding("fail", "", error.what, error.hint)
        return
    addresses = Counter(network.address for network in chosen.values())
    for host, network in chosen.items():
        if len(chosen) > 1 and network.interface == "lo":
            yield Finding("fail", host, "its address is a loopback address", "name the site's network: interface =")
        elif addresses[network.address] > 1:
            same = ", ".join(other for other, n in chosen.items() if n.address == network.address and other != host)
            yield Finding(
                "fail", host, f"{same} has the same address {network.address}", "name another network: interface ="
            )
    speeds = {host: network.speed for host, network in chosen.items() if network.speed}
    if speeds and len(set(speeds.values())) > 1:
        slow = min(speeds, key=lambda host: speeds[host])
        yield Finding(
            "warn", slow, f"{chosen[slow].interface} runs at {speeds[slow]} Mbit/s, others at {max(speeds.values())}"
        )
    first = next(iter(chosen.values()))
    speed = f", {first.speed} Mbit/s" if first.speed else ""
    yield Finding("ok", "", f"the network is {first.interface} ({first.subnet}{speed})")


def _reach(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Every node has reached the first."""
    for report in reports:
        if report.unreached:
            hint = "a firewall between nodes, or the wrong network: name another with interface ="
            yield Finding("fail", report.host, report.unreached, hint)
    untried = sum(report.unreached is None for report in reports)
    if untried:
        yield Finding("warn", "", f"{count(untried, 'node')} connected to no other", "see the failures above")
    elif not any(report.unreached for report in reports):
        yield Finding("ok", "", f"the first node's port is reached from {count(len(reports) - 1, 'node')}")


def _clocks(reports: Sequence[NodeReport], window: tuple[float, float] | None) -> Iterator[Finding]:
    """The nodes' clocks against the time in which they were asked."""
    if not window:
        return
    fine = True
    for report in reports:
        off = max(window[0] - report.base.time, report.base.time - window[1], 0.0)
        if off > SKEW:
            fine = False
            what = f"its clock differs by at least {off:.1f} s from the login node's"
            yield Finding("fail", report.host, what, "ask the site to look at NTP on it")
    if fine:
        yield Finding("ok", "", "the clocks agree with the login node's")


def _versions(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Each package has one version everywhere; who differs from most is named."""
    fine = True
    for package in sorted({name for report in reports for name in report.versions}):
        count = Counter(report.versions.get(package, "") for report in reports)
        usual = count.most_common(1)[0][0]
        for report in reports:
            if (found := report.versions.get(package, "")) != usual:
                fine = False
                what = f"{package} is {found or 'absent'}, on most nodes {usual or 'absent'}"
                yield Finding(
                    "fail", report.host, what, "one environment for all nodes: see python and container of the site"
                )
    shown = ", ".join(f"{name} {number}" for name, number in sorted(reports[0].versions.items()))
    if fine and shown:
        yield Finding("ok", "", f"versions agree: {shown}")


def _gpus(reports: Sequence[NodeReport], wanted: Mapping[str, int]) -> Iterator[Finding]:
    for report in reports:
        want = wanted.get(report.role, 0)
        if report.gpu_count < want:
            hint = f"see gpu_flag and {report.role}.gpus_per_node of the site"
            yield Finding("fail", report.host, f"{report.gpu_count} GPUs for {report.role}, {want} are needed", hint)
        elif want and report.gpus is None:
            yield Finding(
                "warn",
                report.host,
                f"{report.gpu_count} GPUs, but nvidia-smi does not answer",
                "free memory is not known",
            )
        for gpu in report.gpus or ():
            if want and gpu.free < FREE * gpu.total:
                what = f"GPU {gpu.index} has {gpu.free} of {gpu.total} MiB free: something else runs there"
                yield Finding(
                    "warn", report.host, what, "see nvidia-smi there; ask for whole nodes with exclusive = true"
                )
    names = Counter(gpu.name for report in reports if report.role == "trainer" for gpu in report.gpus or ())
    if len(names) > 1:
        mixed = ", ".join(f"{count} {name}" for name, count in names.items())
        yield Finding(
            "warn", "", f"the trainers have different GPUs: {mixed}", "set trainer.gpu_type or trainer.constraint"
        )


def _rest(reports: Iterable[NodeReport], memory: Mapping[str, float]) -> Iterator[Finding]:
    for report in reports:
        yield from (msgspec.structs.replace(finding, host=report.host) for finding in report.findings)
        if report.base.memory < (need := memory.get(report.role, 0.0)):
            what = f"{size(report.base.memory)} of host memory free, the plan takes {size(need)}"
            yield Finding("fail", report.host, what, "hpcrl plan --host-memory names a change that fits")
        if report.shm < SHM:
            hint = "vLLM and NCCL need it: mount more, or see the container's settings"
            yield Finding("warn", report.host, f"only {size(report.shm)} free in /dev/shm", hint)
        if report.locked is not None:
            hint = (
                "InfiniBand needs it unlimited: ask the site for PropagateResourceLimitsExcept=MEMLOCK, "
                "or ulimit -l unlimited in setup"
            )
            yield Finding("warn", report.host, f"a process may lock {size(report.locked)} of memory at most", hint)
