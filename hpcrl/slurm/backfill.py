"""When Slurm's backfill would start a job that comes last in the queue: a pure function of the queue and the nodes.

    expected(nodes, running, waiting, [ask])     # seconds from now; None: never, or too large a queue to go through

What waits gets the earliest place at which it delays nothing before it, as in Slurm's backfill pass; every job is taken
to run to its time limit.  Nodes, GPUs and processors are counted, not memory, licenses or limits of users.

Invariant: no more is placed on a node at any moment than it has; jobs keep the order in which they are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MOST_WORK = 1_500_000  #: jobs that wait, squared, times nodes: some seconds


@dataclass(frozen=True)
class AskedNodes:
    """Nodes that a job has or asks for, or a component of it.

    Attributes:
        gpus, cpus: on each node; whole: all of each, alone.
        partitions: any of these.
        on: nodes that a running job has.
    """

    nodes: int
    gpus: int
    cpus: int
    whole: bool
    partitions: tuple[str, ...]
    on: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobInQueue:
    """A job.

    Attributes:
        seconds: that it may run, of a running one that are left.
        parts: one, or the components of a heterogeneous job, which start together.
    """

    seconds: float
    parts: tuple[AskedNodes, ...]


@dataclass
class NodeInTime:
    """A node, and what is placed on it.

    Attributes:
        taken: (from, to, GPUs, processors).
    """

    name: str
    partitions: frozenset[str]
    gpus: int
    cpus: int
    taken: list[tuple[float, float, int, int]] = field(default_factory=list)

    def free(self, begin: float, end: float, gpus: int, cpus: int, whole: bool) -> bool:
        """Whether so much is free all through."""
        met = [one for one in self.taken if one[0] < end and one[1] > begin]
        if not met:
            return self.gpus >= gpus and self.cpus >= cpus
        if whole:
            return False
        for moment in (begin, *(one[0] for one in met if one[0] > begin)):
            now = [one for one in met if one[0] <= moment < one[1]]
            if sum(one[2] for one in now) + gpus > self.gpus or sum(one[3] for one in now) + cpus > self.cpus:
                return False
        return True

    def take(self, begin: float, end: float, part: AskedNodes) -> None:
        """Place a part on it."""
        self.taken.append((begin, end, *((self.gpus, self.cpus) if part.whole else (part.gpus, part.cpus))))


def expected(
    nodes: Sequence[NodeInTime], running: Iterable[JobInQueue], waiting: Sequence[JobInQueue], asked: JobInQueue
) -> float | None:
    """Seconds until `asked` would start, behind all that waits.

    Args:
        nodes: nothing is placed on them yet.
    """
    if len(waiting) ** 2 * len(nodes) > MOST_WORK:
        return None
    named = {node.name: node for node in nodes}
    for job in running:
        for part in job.parts:
            for name in part.on:
                if name in named:
                    named[name].take(0.0, max(job.seconds, 1.0), part)
    for job in waiting:
        place(nodes, job)
    return place(nodes, asked)


def place(nodes: Sequence[NodeInTime], job: JobInQueue) -> float | None:
    """Place a job at the earliest moment; None if these nodes cannot hold it."""
    moments = sorted({0.0, *(one[1] for node in nodes for one in node.taken)})
    for begin in moments:
        if (found := _all_parts(nodes, job, begin)) is not None:
            for part, chosen in zip(job.parts, found, strict=True):
                for node in chosen:
                    node.take(begin, begin + job.seconds, part)
            return begin
    return None


def _all_parts(nodes: Sequence[NodeInTime], job: JobInQueue, begin: float) -> list[list[NodeInTime]] | None:
    """Nodes for each part from `begin` on, each for one part alone; None if there are too few."""
    used: set[str] = set()
    found = []
    for part in job.parts:
        fitting = (
            node
            for node in nodes
            if node.name not in used
            and node.partitions.intersection(part.partitions)
            and node.free(begin, begin + job.seconds, part.gpus, part.cpus, part.whole)
        )
        chosen = [node for node, _ in zip(fitting, range(part.nodes), strict=False)]
        if len(chosen) < part.nodes:
            return None
        used.update(node.name for node in chosen)
        found.append(chosen)
    return found
