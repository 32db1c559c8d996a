"""When Slurm would start runs of several shapes, asked gently.

    for found in expected_starts(submissions): ...      # in their order

`sbatch --test-only` says whether Slurm would take the script that `hpcrl submit` would send.  The time that it names is
when running jobs leave room, and a mean of what waits on top, the same for every shape.  So the queue is gone through
as the backfill pass does (backfill.py) where all of it is to be seen; where it is not, the time is Slurm's own word.

Invariants: one question at a time, a pause between two, a deadline for each, and no more questions than there are
different requests; a Slurm that does not answer in time is asked no more.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from hpcrl.launch.allocation_request import CPUS_PER_SLOT
from hpcrl.launch.scheduler import Component, Submission
from hpcrl.launch.site import minutes
from hpcrl.run.process import LATE, run_command
from hpcrl.run.queued_job import ExpectedStart
from hpcrl.slurm.backfill import AskedNodes, JobInQueue, NodeInTime, expected
from hpcrl.slurm.node_events import expand
from hpcrl.slurm.partitions import Shape, parse_gres
from hpcrl.slurm.site import SlurmSite
from hpcrl.slurm.submit import preview_script, test_only

PAUSE = 0.5  #: seconds between two questions
LATE_WORDS = "no answer within"  #: of a command that was given up
SECONDS = 20.0  #: that an answer may take
STARTS = re.compile(r"\bto start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
JOBS = "%i|%T|%D|%C|%b|%L|%l|%P|%N|%Q|%h|%r"
NODES = "%N|%P|%c|%G|%t"
#: why a job waits that the next pass of the scheduler would place
WAITS = ("Priority", "Resources", "None", "")
WHOLE = "NO"  #: squeue's word of a job that shares its nodes with no other
HIDDEN = re.compile(r"^PrivateData\s*=.*\b(jobs|nodes)\b", re.MULTILINE)


def expected_starts(submissions: Sequence[Submission]) -> list[ExpectedStart]:
    """When each would start if it alone were submitted now."""
    said: dict[object, ExpectedStart] = {}
    view: QueueView | None = None
    for number, one in enumerate(submissions):
        key = (one.request, one.site)
        if str(key) in said:
            continue
        if any(found.silent for found in said.values()):
            said[str(key)] = ExpectedStart(told="Slurm was not asked again", silent=True)
            continue
        if number:
            time.sleep(PAUSE)
        view = view or read_queue()
        said[str(key)] = _asked(one, view)
    return [said[str((one.request, one.site))] for one in submissions]


def _asked(one: Submission, view: QueueView) -> ExpectedStart:
    verdict = test_only(preview_script(one), SECONDS)
    if not verdict.accepted:
        return ExpectedStart(told=verdict.said, refused=verdict.never, silent=LATE_WORDS in verdict.said)
    now = time.time()
    own = STARTS.search(verdict.said)
    start = time.mktime(time.strptime(own[1], "%Y-%m-%dT%H:%M:%S")) if own else None
    if view.whole:
        ahead = expected(view.nodes(), view.running, view.waiting, as_job(one, view.default))
        if ahead is not None:
            return ExpectedStart(now + ahead, verdict.said, computed=True)
    return ExpectedStart(start, verdict.said)


def as_job(one: Submission, default: str) -> JobInQueue:
    """What a run asks for, as the queue's jobs are read."""
    parts = [_part(component, one.site, default) for component in one.request.components]
    return JobInQueue(60.0 * minutes(one.site.time), tuple(parts))


def _part(component: Component, site: SlurmSite, default: str) -> AskedNodes:
    wish = getattr(site, component.name)
    gpus = component.slots if site.gpus(component.name, component.slots) else 0
    cpus = component.cpus or (1 if site.exclusive else CPUS_PER_SLOT)
    partitions = tuple((wish.partition or default).split(","))
    return AskedNodes(component.nodes, gpus, cpus, site.exclusive, partitions)


# ---- what Slurm says


class QueueView:
    """The queue and the nodes, as they are now.

    Attributes:
        whole: whether all of it was to be seen.
        default: the default partition.
    """

    def __init__(self, jobs: str, nodes: str, whole: bool) -> None:
        self.running, self.waiting = read_jobs(jobs)
        self._nodes, self.default = read_nodes(nodes)
        self.whole = whole and bool(self._nodes)

    def nodes(self) -> list[NodeInTime]:
        """The nodes, with nothing placed on them."""
        return [NodeInTime(node.name, node.partitions, node.gpus, node.cpus) for node in self._nodes]


def read_queue() -> QueueView:
    """Ask Slurm for it, in three questions."""
    answers = []
    for command in (
        ["scontrol", "show", "config"],
        ["sinfo", "--noheader", "--Node", f"--format={NODES}"],
        ["squeue", "--noheader", "--array", "--states=PENDING,RUNNING,COMPLETING", f"--format={JOBS}"],
    ):
        answers.append(run_command(command, SECONDS))
        if answers[-1].code == LATE:
            break
        time.sleep(PAUSE)
    seen = len(answers) == 3 and not any(answer.code for answer in answers) and not HIDDEN.search(answers[0].out)
    return QueueView(answers[2].out, answers[1].out, True) if seen else QueueView("", "", False)


def read_nodes(text: str) -> tuple[list[NodeInTime], str]:
    """(nodes that can be used, the default partition) of lines in the form NODES."""
    found: dict[str, NodeInTime] = {}
    default = ""
    for line in text.splitlines():
        name, partition, cpus, gres, state = (line.strip().split("|") + [""] * 4)[:5]
        if partition.endswith("*"):
            partition = default = partition.removesuffix("*")
        if not cpus.isdecimal() or not Shape(1, state.rstrip("*~#!%$@^-+"), int(cpus), {}).usable:
            continue
        before = found.get(name)
        partitions = frozenset({partition, *(before.partitions if before else ())})
        found[name] = NodeInTime(name, partitions, sum(parse_gres(gres).values()), int(cpus))
    return list(found.values()), default


def read_jobs(text: str) -> tuple[list[JobInQueue], list[JobInQueue]]:
    """(running jobs, jobs that wait for nodes in the order of their priority) of lines in the form JOBS."""
    running: list[JobInQueue] = []
    waiting: dict[str, tuple[int, int, JobInQueue]] = {}
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) != len(JOBS.split("|")) or not cells[2].isdecimal():
            continue
        name, state, count, cpus, gres, left, limit, partition, names, priority, shares, reason = cells
        each = -(-int(cpus) // max(1, int(count))) if cpus.isdecimal() else 1
        gpus = sum(parse_gres(gres.replace("gres:", "")).values())
        on = tuple(expand(names)) if names else ()
        part = AskedNodes(int(count), gpus, each, shares == WHOLE, tuple(partition.split(",")), on)
        if state != "PENDING":
            running.append(JobInQueue(_seconds(left), (part,)))
        elif reason in WAITS:
            first = name.partition("+")[0]  # the components of a heterogeneous job start together
            before = waiting.get(first)
            parts = (*before[2].parts, part) if before else (part,)
            age = int(re.match(r"\d*", name)[0] or 0)  # of equal priority the one that came first
            place = before[:2] if before else (-int(priority) if priority.isdecimal() else 0, age)
            waiting[first] = (*place, JobInQueue(_seconds(limit), parts))
    return running, [job for _, _, job in sorted(waiting.values(), key=lambda one: one[:2])]


FOREVER = 366 * 86400.0


def _seconds(text: str) -> float:
    """Of Slurm's D-HH:MM:SS; FOREVER where there is no limit, 1 where it is past."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in [*parts, days or "0"]):
        return FOREVER if "INVALID" not in text and "NOT" not in text else 1.0
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return max(1.0, 86400.0 * int(days or 0) + seconds)
