"""Slurm as the login node sees it: are the commands there, do they answer, can the partitions hold the request.

Invariant: only what Slurm's own commands say is judged, and each is waited for `SECONDS` at most.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from hpcrl.errors import UsageError
from hpcrl.launch.allocation_request import AllocationRequest, Component
from hpcrl.launch.site import SiteProfile, minutes
from hpcrl.run.process import CommandResult, run_command
from hpcrl.utils.check_results import Finding, count

SECONDS = 10.0
LOGIN = "log in to a node of the cluster that submits jobs; hpcrl run needs no Slurm"


class Partition(msgspec.Struct, frozen=True):
    """A partition as `scontrol show partition` describes it.

    Attributes:
        limit: minutes, inf for none.
        nodes: most that a job may have.
    """

    name: str
    state: str
    limit: float
    nodes: float
    total: int


class Shape(msgspec.Struct, frozen=True):
    """Nodes of a partition with the same properties.

    Attributes:
        gpus: by type, "" for an untyped one; usable: not down, drained or failed.
        memory: MiB; inf if it is not known.
    """

    nodes: int
    state: str
    cpus: int
    gpus: dict[str, int]
    memory: float = math.inf

    @property
    def usable(self) -> bool:
        return not re.match(r"(down|drain|drng|fail|unk|inval|maint|boot_fail|power_down|reboot)", self.state)


def responds(seconds: float = SECONDS) -> Iterator[Finding]:
    """Commands, controller, accounting."""
    missing = [name for name in ("sbatch", "srun", "squeue", "scontrol", "sinfo") if not shutil.which(name)]
    if missing:
        yield Finding("fail", "", f"{', '.join(missing)} not found: no Slurm here", LOGIN)
        return
    version, answer = (
        run_command(["sbatch", "--version"], seconds),
        run_command(["squeue", "--noheader", "--format=%i", "--me"], seconds),
    )
    if answer.code != 0:
        yield Finding("fail", "", f"squeue: {answer.last_output}", "is the controller up? see scontrol ping")
        return
    yield Finding(
        "ok", "", f"{version.out.strip()}, the controller answers; {count(len(answer.out.split()), 'job')} of yours"
    )
    if shutil.which("sacct") is None or run_command(["sacct", "--noheader", "--allocations"], seconds).code != 0:
        yield Finding(
            "warn", "", "sacct gives no answer: no accounting", "states of ended jobs come from the run directory alone"
        )


def judge_request(site: SiteProfile, request: AllocationRequest) -> Iterator[Finding]:
    """Whether the site can hold the request: what it cannot would be refused, or wait for ever."""
    yield from fits(site, request.components)
    yield from queued_again(request)


def fits(site: SiteProfile, wanted: Iterable[Component], seconds: float = SECONDS) -> Iterator[Finding]:
    """Whether the partitions can hold the components: of what they cannot, sbatch accepts some, to let it pend for
    ever.  And whether their steps reach each other."""
    components = list(wanted)
    yield from steps_apart(site, components)
    for need in components:
        yield from _component(site, need, seconds)


def steps_apart(site: SiteProfile, components: Sequence[Component]) -> Iterator[Finding]:
    """On Slingshot, processes exchange data past the kernel only under a common VNI, which Slurm gives each step unless
    the job asks for one of its own (sbatch --network=job_vni); no job shares another's.

    Source: mochi.readthedocs.io/en/latest/misc/06_cxi.html.
    """
    names = {component.name for component in components if component.slots}
    if "engine" not in names or not (site.interface or "").startswith("hsn"):
        return
    hint = "start engines in the run's own job, or send the weights over sockets: --weight-transfer gloo"
    if "trainer" in names:
        if all("job_vni" in str(getattr(site, name).extra.get("network", "")) for name in names):
            return
        hint = (
            "--layout homogeneous starts all in one step; or extra.network=job_vni for each component, where the "
            "centre says that components share it"
        )
    yield Finding(
        "warn", "", "engines are in another step than the trainer: on Slingshot NCCL may not reach them", hint
    )


def queued_again(request: AllocationRequest) -> Iterator[Finding]:
    """Slurm takes a node that it has declared down out of a job with --no-kill, but queues a heterogeneous job again as
    a whole if one of its components consists of one node (seen with Slurm 26.05.5)."""
    alone = [component.name for component in request.components if component.nodes == 1]
    if alone and request.outlives_nodes and len(request.components) > 1:
        yield Finding(
            "warn",
            "",
            f"the component {alone[0]} has one node: if any node of the job goes down, Slurm queues all of it again",
            "give each component two nodes, or fewer components, for a job that continues without the node",
        )


def _component(site: SiteProfile, need: Component, seconds: float) -> Iterator[Finding]:
    """With a list of partitions Slurm takes whichever can start the job first: one of them has to hold it."""
    wanted = getattr(site, need.name)
    judged = [_partition_holds(site, need, name, seconds) for name in (wanted.partition or "").split(",")]
    best = next((found for found in judged if all(f.level == "ok" for f in found)), None)
    best = best or next((found for found in judged if all(f.level != "fail" for f in found)), None)
    yield from best or [finding for found in judged for finding in found]


def _partition_holds(site: SiteProfile, need: Component, name: str, seconds: float) -> list[Finding]:
    """Whether the partition has room for the job.

    Args:
        name: "" for the default partition.
    """
    shown = run_command(["scontrol", "show", "partition", "--oneliner", *([name] if name else [])], seconds)
    found = [partition for partition, default in partitions(shown) if name or default]
    if not found:
        hint = f"set {need.name}.partition; there are {_list(seconds)}"
        if name:
            return [Finding("fail", "", f"{need.name}.partition {name}: {shown.last_output}", hint)]
        if shown.code:
            what = f"scontrol does not say what partitions there are: {shown.last_output}"
            return [Finding("warn", "", what, "see scontrol ping")]
        what = "there is no default partition: unless the site chooses one, sbatch refuses the job"
        return [Finding("warn", "", what, hint)]
    command = ["sinfo", "--noheader", f"--partition={found[0].name}", "--format=%D|%t|%c|%G|%m"]
    shapes = parse_shapes(run_command(command, seconds).out)
    gpus = need.slots if site.gpus(need.name, need.slots) else 0
    wish = getattr(site, need.name)
    return judge_component(need, found[0], shapes, minutes(site.time), wish.gpu_type, gpus, wish.mem)


def _list(seconds: float) -> str:
    answer = run_command(["sinfo", "--noheader", "--format=%R"], seconds)
    return ", ".join(dict.fromkeys(answer.out.split())) if answer.code == 0 else "none that sinfo shows"


# ---- reading


def partitions(answer: CommandResult) -> list[tuple[Partition, bool]]:
    """(partition, whether it is the default) of each line of `scontrol show partition --oneliner`."""
    return (
        [_partition(line) for line in answer.out.splitlines() if line.startswith("PartitionName=")]
        if answer.code == 0
        else []
    )


def _partition(line: str) -> tuple[Partition, bool]:
    values = dict(word.split("=", 1) for word in line.split() if "=" in word)
    made = Partition(
        values["PartitionName"],
        values.get("State", "UNKNOWN"),
        _limit(values.get("MaxTime", "UNLIMITED")),
        _count(values.get("MaxNodes", "UNLIMITED")),
        int(values.get("TotalNodes", 0)),
    )
    return made, values.get("Default") == "YES"


def _limit(text: str) -> float:
    try:
        return minutes(text)
    except UsageError:  # UNLIMITED, or something newer
        return math.inf


def _count(text: str) -> float:
    return int(text) if text.isdecimal() else math.inf


def parse_shapes(text: str) -> list[Shape]:
    """Lines `nodes|state|cpus|gres|MiB` of sinfo, such as `4|idle|64|gpu:h100:8(S:0-1)|64000`; `64+` is 64 or more."""
    found = []
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) >= 4 and words[0].isdecimal() and words[2].rstrip("+").isdecimal():
            state = words[1].rstrip("*~#!%$@^-+")
            cpus = int(words[2].rstrip("+"))
            memory = _count(words[4].rstrip("+")) if len(words) > 4 else math.inf
            found.append(Shape(int(words[0]), state, cpus, parse_gres(words[3]), memory))
    return found


def parse_gres(text: str) -> dict[str, int]:
    """GPUs by type in a node's generic resources: gpu:8, gpu:a100:4(S:0-1), several with commas."""
    found: dict[str, int] = {}
    for kind, number in re.findall(r"(?:^|,)(?:gres/)?gpu:(?:([^:,()]+):)?(\d+)", re.sub(r"\([^()]*\)", "", text)):
        found[kind] = found.get(kind, 0) + int(number)
    return found


# ---- judging


def judge_component(
    need: Component,
    partition: Partition,
    shapes: Iterable[Shape],
    limit: int,
    gpu_type: str | None,
    gpus: int | None = None,
    mem: str | None = None,
) -> list[Finding]:
    """Whether a partition can hold a component for `limit` minutes; a job that it cannot hold may pend for ever.

    Args:
        gpus: of each node; None: as many as slots; 0: the slots are processes, and no node needs a GPU.
        mem: of each node, as sbatch's --mem.
    """
    gpus = need.slots if gpus is None else gpus
    where = f"{need.name}.partition {partition.name}"
    set_it = f"set {need.name}.partition to another"
    wrong = []
    if partition.state == "DOWN":  # it takes jobs, which wait; INACTIVE and DRAIN take none
        wrong.append(Finding("warn", "", f"{where} is DOWN", f"it will wait until the partition is up, or {set_it}"))
    elif partition.state != "UP":
        wrong.append(Finding("fail", "", f"{where} is {partition.state}", set_it))
    if limit > partition.limit:
        hint = f"a run continues by requeueing: lower time, or {set_it}"
        wrong.append(
            Finding(
                "fail", "", f"{where}: time is {limit} minutes, the partition's limit is {partition.limit:.0f}", hint
            )
        )
    if need.nodes > partition.nodes:
        wrong.append(
            Finding("fail", "", f"{where}: {need.nodes} nodes requested, a job may have {partition.nodes:.0f}", set_it)
        )
    fitting = [
        shape
        for shape in shapes
        if (shape.gpus.get(gpu_type, 0) if gpus and gpu_type else sum(shape.gpus.values())) >= gpus
        and shape.cpus >= (need.cpus or 0)
        and shape.memory >= _mebibytes(mem or "0")
    ]
    have = sum(shape.nodes for shape in fitting)
    up = sum(shape.nodes for shape in fitting if shape.usable)
    kind = f"{gpu_type} GPU" if gpu_type else "GPU"
    each = [count(gpus, kind)] if gpus or not need.cpus else []
    each += [f"{need.cpus} CPUs"] if need.cpus else []
    each += [f"{mem} of memory"] if mem and _mebibytes(mem) else []
    asked = f"{count(need.nodes, 'node')} with {' and '.join(each)}"
    if have < need.nodes:
        hint = f"ask for less (gpus_per_node, cpus_per_node, mem, nodes), or {set_it}"
        wrong.append(
            Finding("fail", "", f"{where}: {asked} requested; {have} of its {partition.total} nodes have that", hint)
        )
    elif up < need.nodes:
        wrong.append(
            Finding("warn", "", f"{where}: {asked} requested, {up} of {have} such nodes are up", "it will wait")
        )
    return wrong or [Finding("ok", "", f"{where} holds {asked} for {limit} minutes; {up} such now up")]


def _mebibytes(mem: str) -> float:
    """sbatch's --mem in MiB: a number with K, M (the default), G or T."""
    number, unit = re.fullmatch(r"(\d+)([KMGT]?)", mem).groups()
    return int(number) * 1024.0 ** ("KMGT".index(unit or "M") - 1)
