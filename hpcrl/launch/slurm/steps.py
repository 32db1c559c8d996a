"""The job steps of a Slurm job: for each of its components the srun that starts a task on each of its nodes, and what
it says of them while it runs.

Invariant: components and their nodes, in order, are those of Slurm's node lists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrl.errors import UsageError
from hpcrl.launch.attempts.host_processes import HostProcess
from hpcrl.launch.slurm.node_events import expand
from hpcrl.report.file_tail import FileTail
from hpcrl.report.progress import say

#: "srun: error: node2: task 1: Killed": a task that could say nothing itself; one that was ended with it is
#: "Terminated"
KILLED = re.compile(
    rb"srun: error: (?P<node>\S+): tasks? [\d,-]+: (?!Terminated|Exited)|srun: error: Node failure on (?P<failed>\S+)"
)
KEPT = "--no-kill"  #: of an srun that outlives a node
ENDED = re.compile(rb"srun: error: (?P<nodes>\S+): tasks? [\d,-]+: ")  #: of tasks that ended in whatever way, but well


@dataclass(frozen=True)
class HetGroup:
    """One component of the job: its nodes, the slots of each, and the srun that starts a task on each of them.

    Attributes:
        spares: those of the nodes that wait until another is lost.
    """

    nodes: tuple[str, ...]
    slots: int
    step: tuple[str, ...]
    spares: tuple[str, ...] = ()

    def without(self, names: Collection[str]) -> HetGroup:
        """The component without these nodes."""
        left = tuple(node for node in self.nodes if node not in names)
        if left == self.nodes:
            return self
        tasks = [int(word.partition("=")[2]) for word in self.step if word.startswith("--ntasks-per-node=")]
        count = len(left) * (tasks[-1] if tasks else 1)
        more = [f"--nodelist={','.join(left)}", f"--nodes={len(left)}", f"--ntasks={count}"]
        return HetGroup(left, self.slots, with_options(self.step, more), self.spares)


def read_groups(environment: Mapping[str, str]) -> list[HetGroup]:
    """The components, from what Slurm and the batch script put into the environment.

    Raises:
        UsageError: if this is not a job, the script lacks a HPCRL_STEP_k or HPCRL_SLOTS_k, or task.sh is not there.
    """
    if "SLURM_JOB_ID" not in environment:
        raise UsageError("this is not inside a Slurm job", "submit it with hpcrl submit, or give the script to sbatch")
    count = int(environment.get("SLURM_HET_SIZE", "1"))
    found = []
    for index in range(count):
        suffix = f"_HET_GROUP_{index}" if "SLURM_HET_SIZE" in environment else ""
        try:
            nodes = expand(environment[f"SLURM_JOB_NODELIST{suffix}"])
            step = environment[f"HPCRL_STEP_{index}"]
            slots = int(environment[f"HPCRL_SLOTS_{index}"])
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"the job's environment has no valid {error}",
                "start from a script of sbatch/ or of hpcrl submit --dry-run",
            ) from error
        words = tuple(shlex.split(step))
        if words and words[-1].endswith("task.sh") and not Path(words[-1]).is_file():
            raise UsageError(
                f"HPCRL_STEP_{index} starts {words[-1]}, which does not exist",
                "submit the script from the directory that holds it, or print it again with hpcrl submit --print",
            )
        found.append(_trimmed_group(HetGroup(tuple(nodes), slots, words)))
    spares, first = int(environment.get("HPCRL_SPARES", "0")), found[0]
    if not 0 <= spares < len(first.nodes):
        raise UsageError(
            f"HPCRL_SPARES={spares}: the first component of the job has {len(first.nodes)} nodes",
            "request one more node for each spare",
        )
    return (
        [dataclasses.replace(first, spares=first.nodes[len(first.nodes) - spares :]), *found[1:]] if spares else found
    )


def _trimmed_group(group: HetGroup) -> HetGroup:
    """The component on as many nodes as its srun asks for: an allocation may have more, which its user has for other
    things."""
    counts = [int(found[1]) for word in group.step if (found := re.fullmatch(r"--nodes=(\d+)", word))]
    if not counts or counts[-1] >= len(group.nodes):
        return group
    nodes, spare = group.nodes[: counts[-1]], group.nodes[counts[-1] :]
    say(f"note: the run takes {counts[-1]} of the job's {len(group.nodes)} nodes, and not {', '.join(spare)}")
    return HetGroup(nodes, group.slots, with_options(group.step, [f"--nodelist={','.join(nodes)}"]))


@dataclass
class Step(HostProcess):
    """An srun over the nodes of a component, which outlives the first of its tasks that dies for up to Slurm's KillWait
    (30 s), and with --no-kill the end of a node.

    Attributes:
        nodes: those that the attempt uses.
        failed: those that Slurm has lost.
    """

    nodes: tuple[str, ...] = ()
    all: tuple[str, ...] = ()
    failed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._tail = FileTail(self.log)
        self._lost = ""
        self._badly: set[str] = set()  #: nodes on which a task has not ended well

    @property
    def status(self) -> int | None:
        """That of its tasks on the nodes that the attempt uses, where it outlives others."""
        code = self.process.poll()
        if code and code > 0 and KEPT in self.process.args:  # type: ignore[operator]
            self.lost()
            known = self._badly | self.failed
            return code if self._lost or not known or known & set(self.nodes) else 0
        return code

    def lost(self) -> str:
        for line in self._tail.new():
            if ended := ENDED.match(line):
                with contextlib.suppress(UsageError):
                    self._badly.update(expand(ended["nodes"].decode(errors="replace")))
            found = KILLED.match(line)
            node = (found["node"] or found["failed"]).decode(errors="replace") if found else ""
            if found and found["failed"]:
                self.failed |= {node}
            if node in self.nodes and not self._lost:
                said = line.decode(errors="replace")
                self._lost = f"host {node}: its process died before the run was over ({said}); see {self.log}"
        return self._lost

    def lives_without(self) -> frozenset[str]:
        """Slurm ends the rest of a step without --no-kill."""
        return self.failed if KEPT in self.process.args else frozenset()  # type: ignore[operator]

    def continues(self, folder: Path, hosts: Collection[str]) -> None:
        super().continues(folder, hosts)
        self._tail.path = self.log  # the same file, of which no line is read twice
        self.nodes, self._lost = tuple(node for node in self.all if node in hosts), ""


def step_on(step: tuple[str, ...], node: str) -> list[str]:
    """The same srun, for one task on one node."""
    return list(with_options(step, [f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]))


def without_container(step: Sequence[str]) -> list[str]:
    """The srun alone, outside of the site's container, where Slurm's commands are."""
    options = itertools.takewhile(lambda word: word.startswith("-"), step[1:])
    return [step[0], *(word for word in options if not word.startswith("--container"))]


def with_options(step: tuple[str, ...], options: Sequence[str]) -> tuple[str, ...]:
    """The same srun with more options: of those given twice the later counts."""
    at = next((i for i, word in enumerate(step) if i and not word.startswith("-")), len(step))
    return (*step[:at], *options, *step[at:])
