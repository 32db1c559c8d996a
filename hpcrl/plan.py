"""Who runs where: a pure function of the options and an ordered list of hosts with slots.

Invariants: rank order is host order, then slot; every slot has one role, or two (trainer and engine) with --colocate;
the same inputs give the same Plan, however the processes are started (local processes, Slurm, mpirun).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from hpcrl.errors import UsageError

if TYPE_CHECKING:  # it takes pydantic, which `hpcrl status` does without
    from hpcrl.config.options import Options

#: values of CUDA_VISIBLE_DEVICES that hide all GPUs; the second is Slurm's
NO_GPUS = ("", "NoDevFiles")

#: seconds between two looks of a process into the run directory of a run on one host; of the ranks of one of several
LOOK, LOOK_SHARED = 0.2, 4.0


class Host(msgspec.Struct, frozen=True):
    """A machine and the number of GPUs (or process slots) that the run may use there.

    Attributes:
        address: where its processes listen, on the network that the run uses; empty: what the name resolves to.
        interface: the network interface that has this address; empty: not known, and left to gloo and NCCL.
        spare: whether it only waits until another host is lost (launch/attempts/spare_hosts.py).
    """

    name: str
    slots: int
    address: str = ""
    interface: str = ""
    spare: bool = False


class Location(msgspec.Struct, frozen=True):
    """Where one process runs: the host and the slots (GPU numbers) that it owns there; address and interface as in
    Host.

    Attributes:
        also: an engine larger than a host owns these as well; its server sits on `host`.
    """

    host: str
    slots: tuple[int, ...]
    address: str = ""
    interface: str = ""
    also: tuple[Location, ...] = ()

    @property
    def at(self) -> str:
        """The address to listen on and to be reached at."""
        return self.address or self.host

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts that the process needs."""
        return (self.host, *(place.host for place in self.also))


class Plan(msgspec.Struct, frozen=True):
    """Who runs where in one attempt.

    Attributes:
        trainers: one Location a rank, in rank order.
        engines: one Location an engine.
        rollout: the host of the rollout process.
        sandboxes: one Location, without slots, for each host that has sandboxes.
        external: addresses of engines that the run does not start, numbered after its own.
    """

    run_id: str
    attempt: int
    trainers: tuple[Location, ...]
    engines: tuple[Location, ...]
    rollout: Location
    external: tuple[str, ...] = ()
    sandboxes: tuple[Location, ...] = ()

    @property
    def engine_count(self) -> int:
        """Engines that the run begins with, its own and others."""
        return len(self.engines) + len(self.external)

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, each once, in order of first use."""
        places = (*self.trainers, *self.engines, self.rollout, *self.sandboxes)
        return tuple(dict.fromkeys(host for place in places for host in place.hosts))

    @property
    def needed_hosts(self) -> tuple[str, ...]:
        """Those of `hosts` that the run cannot do without: all but such as have sandboxes and nothing else."""
        return msgspec.structs.replace(self, sandboxes=()).hosts

    def engine_nodes(self, index: int) -> tuple[Location, ...]:
        """The parts of an engine, one a host; its server sits on the first."""
        return (self.engines[index], *self.engines[index].also)

    @property
    def trainer_hosts(self) -> tuple[str, ...]:
        """The hosts with trainer ranks, in rank order."""
        return tuple(dict.fromkeys(place.host for place in self.trainers))

    def rank_look(self) -> float:
        """Seconds between two looks of a waiting trainer rank into the run directory.

        On one host they are what ends a wait at once.  Hosts share the directory's servers, and each has a process that
        looks for all of its ranks and ends them (`hpcrl/launch/host.py`): the ranks of a host together add one look in
        LOOK_SHARED seconds.
        """
        if len(self.hosts) < 2:
            return LOOK
        return LOOK_SHARED * math.ceil(len(self.trainers) / max(1, len(self.trainer_hosts)))

    def slots_on(self, host: str) -> int:
        """How many slots of a host there are, from 0 to the last that anything uses."""
        places = (place for first in (*self.trainers, *self.engines) for place in (first, *first.also))
        return 1 + max((slot for place in places if place.host == host for slot in place.slots), default=-1)

    def ranks_on(self, host: str) -> tuple[int, ...]:
        """The trainer ranks of a host, in order."""
        return tuple(rank for rank, place in enumerate(self.trainers) if place.host == host)

    def table(self, most: int | None = None) -> str:
        """The plan as text, one process a line; runs of ranks on a host share a line.

        Args:
            most: lines at most: of more, those in the middle are left out, and counted.
        """
        rows = [("role", "index", "host", "slots")]
        for host in self.trainer_hosts:
            ranks = self.ranks_on(host)
            slots = folded([slot for rank in ranks for slot in self.trainers[rank].slots])
            rows.append(("trainer", folded(ranks), host, slots))
        for number, engine in enumerate(self.engines):
            for place in (engine, *engine.also):
                rows.append(("engine", str(number), place.host, folded(place.slots)))
        rows += [("engine", str(len(self.engines) + n), address, "external") for n, address in enumerate(self.external)]
        rows.append(("rollout", "0", self.rollout.host, "-"))
        rows += [("sandbox", str(number), place.host, "-") for number, place in enumerate(self.sandboxes)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        if most is not None and len(lines) > most:
            lines[most - 3 : -2] = [f"... {len(lines) - most + 1} more lines"]
        return "\n".join(lines)


def visible_devices(
    inherited: str | None, slots: tuple[int, ...], on_host: int, own: tuple[int, ...] | None = None
) -> str:
    """CUDA_VISIBLE_DEVICES of a process that owns `slots` of its host.

    A list of at least `on_host` names holds all GPUs of the run, and is counted by slot. A shorter one can only be a
    task's own, to which the scheduler has bound its GPUs (--gpus-per-task).

    Args:
        inherited: the list that we were started with; None or empty: there is none.
        on_host: how many slots the run has there, counted from 0 to the last that anything uses.
        own: in a task of one slot alone, the slots of what it starts; None in a task of the whole host.

    Raises:
        UsageError: for any other: counting in it, or taking it as it is, would put two processes on one GPU.
    """
    if not inherited:
        return ",".join(map(str, slots))
    names = inherited.split(",")
    if len(names) >= on_host:
        return ",".join(names[slot] for slot in slots)
    if own is not None and len(names) == len(own):
        return inherited
    if own is not None:
        raise UsageError(
            f"CUDA_VISIBLE_DEVICES={inherited} holds {len(names)} GPUs bound to this task, {len(own)} are needed: slots"
            f" {folded(own)} of the plan",
            "let each task see all GPUs of its node: --gpus-per-node without --gpus-per-task, --gpu-bind=none",
        )
    raise UsageError(
        f"CUDA_VISIBLE_DEVICES={inherited} holds {len(names)} GPUs, the plan uses {on_host} slots of this host",
        "unset it, or list all GPUs of the run",
    )


def socket_names(place: Location) -> dict[str, str]:
    """The environment that keeps gloo and NCCL on the network of the plan; empty if its interface is not known."""
    if not place.interface:
        return {}
    return {"GLOO_SOCKET_IFNAME": place.interface, "NCCL_SOCKET_IFNAME": f"={place.interface}"}


def folded(numbers: Iterable[int]) -> str:
    """0-3,6: ascending numbers, runs of them folded."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"


def local_hosts(options: Options) -> list[Host]:
    """This machine as one host with as many slots as the options ask for."""
    gpus = options.num_engines * options.rollout_num_gpus_per_engine
    slots = max(options.trainer_slots, gpus) if options.colocate else options.trainer_slots + gpus
    return [Host("127.0.0.1", slots, "127.0.0.1", "lo")]


def make_plan(options: Options, hosts: list[Host], run_id: str, attempt: int = 0, kept: int = 0) -> Plan:
    """Trainers first, engines in the remaining slots, the rollout process on a host without slots or with engine 0.

    Trainers take --actor-num-gpus-per-node slots on each of the first --actor-num-nodes hosts that have them (one host
    may stand for several nodes if it is the only one). An engine is inside one host, or on whole hosts next to each
    other. With --colocate, engines take the same slots as trainers. With --debug-rollout-only there is no trainer but a
    process without slots that drives the rollouts, on the rollout process's host. Sandboxes are on hosts of their own,
    the last without slots, or else the last that nothing else is on, or next to engines. Spare hosts are left out.

    Args:
        kept: how many of these hosts a stage of the job has for sandboxes (`hosts_kept`): the rollout process of none
            is there, where its work would have to make room.

    Raises:
        UsageError: names the host and the number that do not fit.
    """
    names = [host.name for host in hosts]
    hosts = [host for host in hosts if not host.spare]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"host {twice} is listed twice", "give each host once, with all its slots")
    free = {host.name: list(range(host.slots)) for host in hosts}
    known = {host.name: host for host in hosts}
    trainers = () if options.debug_rollout_only else _trainers(options, known, free)
    if options.colocate:
        free = {host.name: list(range(host.slots)) for host in hosts}
    engines = tuple(_engine(options, known, free) for _ in range(options.num_engines))
    left = _own_hosts(options, hosts, trainers, engines, kept)
    spare = next((host for host in hosts if host.slots == 0 and host not in left), None)
    own = left[len(left) - options.own_sandbox_hosts :]
    rollout = _place(spare or known[(engines or trainers)[0].host], ())
    if options.sandbox_on == "engines":
        own = [known[name] for name in dict.fromkeys(host for engine in engines for host in engine.hosts)]
    sandboxes = tuple(_place(host, ()) for host in own)
    external = tuple(options.rollout_external_engine_addrs) if options.needs_engines else ()
    return Plan(run_id, attempt, trainers or (rollout,), engines, rollout, external, sandboxes)


def _place(host: Host, slots: Iterable[int], also: tuple[Location, ...] = ()) -> Location:
    return Location(host.name, tuple(slots), host.address, host.interface, also)


def hosts_kept(stages: Iterable[Options]) -> int:
    """How many hosts of a job are for sandboxes alone, in the stage that has most of them."""
    return max((options.own_sandbox_hosts for options in stages), default=0)


def _own_hosts(
    options: Options, hosts: list[Host], trainers: Sequence[Location], engines: Sequence[Location], kept: int
) -> list[Host]:
    """The hosts for --sandbox-on nodes, those of this stage last.

    Raises:
        UsageError: if there are not as many.
    """
    count = options.own_sandbox_hosts
    if count and len(hosts) == 1:
        return hosts * count  # one machine stands for all nodes, as on a laptop
    used = {host for place in (*trainers, *engines) for host in place.hosts}
    free = [host for host in hosts if host.name not in used]
    if count > len(free):
        raise UsageError(
            f"--sandbox-num-nodes {count}: ranks and engines leave {len(free)} of the {len(hosts)} hosts free",
            "list more hosts (in a hostfile with slots=0), ask for fewer, or give --sandbox-on engines",
        )
    free.sort(key=lambda host: host.slots == 0)
    return free[max(len(free) - max(count, kept), 0) :]


def _trainers(options: Options, hosts: dict[str, Host], free: dict[str, list[int]]) -> tuple[Location, ...]:
    """One Place a rank; their slots are taken out of `free`."""
    nodes = options.actor_num_nodes
    each = options.actor_num_gpus_per_node
    chosen = [name for name in hosts if len(free[name]) >= each][:nodes]
    if len(chosen) < nodes and len([host for host in hosts.values() if host.slots]) == 1 and chosen:
        chosen = [chosen[0]] * nodes  # one machine stands for all nodes, as on a laptop
    if len(chosen) < nodes or any(len(free[name]) < each * chosen.count(name) for name in chosen):
        raise _misfit(
            options, hosts, f"--actor-num-nodes {nodes} x --actor-num-gpus-per-node {each} trainer ranks do not fit"
        )
    return tuple(_place(hosts[name], (free[name].pop(0),)) for name in chosen for _ in range(each))


def _engine(options: Options, hosts: dict[str, Host], free: dict[str, list[int]]) -> Location:
    """The first place with enough free slots: in one host, or else on whole hosts one after another."""
    size = options.rollout_num_gpus_per_engine
    for name, slots in free.items():
        if len(slots) >= size:
            return _place(hosts[name], [slots.pop(0) for _ in range(size)])
    names = [name for name in hosts if hosts[name].slots]
    for first in range(len(names)):
        taken: list[str] = []
        while sum(hosts[name].slots for name in taken) < size and first + len(taken) < len(names):
            taken.append(names[first + len(taken)])
        whole = all(len(free[name]) == hosts[name].slots for name in taken)
        sizes = [hosts[name].slots for name in taken]
        if whole and sum(sizes) == size and len(set(sizes)) == 1:
            parts = [_place(hosts[name], free[name]) for name in taken]
            free.update({name: [] for name in taken})
            return _place(hosts[taken[0]], parts[0].slots, tuple(parts[1:]))
    raise _misfit(options, hosts, f"engines of --rollout-num-gpus-per-engine {size} slots do not fit")


def _misfit(options: Options, hosts: dict[str, Host], what: str) -> UsageError:
    wanted = local_hosts(options)[0].slots
    have = ", ".join(f"{host.name} {host.slots}" for host in hosts.values())
    spare = f"; --spares {options.spares} are not counted" if options.spares else ""
    total = sum(host.slots for host in hosts.values())
    return UsageError(
        f"{what}: the run needs {wanted} slots, the hosts have {total} ({have}{spare})",
        "list more hosts or slots, or change --actor-num-nodes, --actor-num-gpus-per-node or --rollout-num-gpus",
    )
