"""Who runs where: a pure function of the options and an ordered list of hosts with slots.

Invariants: rank order is host order, then slot; every slot has at most one role; the same inputs give the same Plan,
whoever starts the processes (local processes, Slurm, mpirun).
"""

from __future__ import annotations

import msgspec

from hpcrl.errors import UsageError
from hpcrl.options import Options


class Host(msgspec.Struct, frozen=True):
    """A machine and the number of GPUs (or process slots) that the run may use there."""

    name: str
    slots: int


class Place(msgspec.Struct, frozen=True):
    """Where one process runs: the host and the slots (GPU numbers) that it owns there."""

    host: str
    slots: tuple[int, ...]


class Plan(msgspec.Struct, frozen=True):
    """Who runs where in one attempt.

    trainers: one Place a rank, in rank order; engines: one Place an engine; rollout: the host of the rollout process.
    """

    run_id: str
    attempt: int
    trainers: tuple[Place, ...]
    engines: tuple[Place, ...]
    rollout: Place

    @property
    def hosts(self) -> tuple[str, ...]:
        """All hosts, each once, in order of first use."""
        return tuple(dict.fromkeys(p.host for p in (*self.trainers, *self.engines, self.rollout)))

    def table(self) -> str:
        """The plan as text, one process a line."""
        rows = [("role", "index", "host", "slots")]
        rows += [("trainer", str(i), p.host, _spell(p.slots)) for i, p in enumerate(self.trainers)]
        rows += [("engine", str(i), p.host, _spell(p.slots)) for i, p in enumerate(self.engines)]
        rows.append(("rollout", "0", self.rollout.host, "-"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _spell(slots: tuple[int, ...]) -> str:
    return ",".join(map(str, slots)) or "-"


def local_hosts(options: Options) -> list[Host]:
    """This machine as one host with as many slots as the options ask for."""
    return [Host("127.0.0.1", options.world_size + (options.rollout_num_gpus or 0))]


def make_plan(options: Options, hosts: list[Host], run_id: str, attempt: int = 0) -> Plan:
    """Trainers take the first slots, engines the next; the rollout process sits with the first engine, or else rank 0.

    UsageError when the slots do not suffice, or an engine would have to span hosts.
    """
    slots = [(host.name, slot) for host in hosts for slot in range(host.slots)]
    wanted = options.world_size + options.num_engines * options.rollout_num_gpus_per_engine
    if len(slots) < wanted:
        raise UsageError(
            f"{options.world_size} trainer ranks and {options.num_engines} engines of {options.rollout_num_gpus_per_engine} need "
            f"{wanted} slots, the hosts have {len(slots)}",
            "lower --actor-num-gpus-per-node or --rollout-num-gpus",
        )
    trainers = tuple(Place(host, (slot,)) for host, slot in slots[: options.world_size])
    free, engines = slots[options.world_size :], []
    for number in range(options.num_engines):
        taken, free = free[: options.rollout_num_gpus_per_engine], free[options.rollout_num_gpus_per_engine :]
        if len({host for host, _ in taken}) > 1:
            raise UsageError(
                f"engine {number} would span {taken[0][0]} and {taken[-1][0]}",
                "choose --rollout-num-gpus-per-engine to divide a node",
            )
        engines.append(Place(taken[0][0], tuple(slot for _, slot in taken)))
    rollout = Place((engines[0] if engines else trainers[0]).host, ())
    return Plan(run_id, attempt, trainers, tuple(engines), rollout)
