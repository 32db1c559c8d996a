"""Which hosts Slurm has lost, and when: what it says of them now, and what its accounting keeps of their failures.

Invariant: a host is named only for a failure that began within the time asked for; where neither can be had, none is
named.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from hpcrl.errors import UsageError
from hpcrl.launch.slurm import squeue
from hpcrl.run.queued_job import QueueAnswer

LATER = 60.0  #: seconds after a job's end in which Slurm may still write down what ended it
DRAINED = 1800.0  #: seconds before a failure within which a drain is taken for its cause
#: what health checks (NHC, DCGM, a centre's own) write as the reason for draining a node whose hardware is at fault:
#: the part, and what is wrong with it; and what administrators write of work that they have planned
HEALTH = re.compile(
    r"\b(s?xid|gpus?|nvlink|nvswitch|nvidia|dcgm|ecc|edac|mce|infiniband|hcas?|ib\d*|hsn\d*)\b", re.IGNORECASE
)
FAULT = re.compile(
    r"xid|fail|error|fault|\becc\b|fallen|\bdown\b|\bbad\b|broken|degraded|check|dead\b|lost\b|missing", re.IGNORECASE
)
PLANNED = re.compile(r"updat|upgrad|maint|firmware|driver|reboot|swap|replace|reserv|moved|planned", re.IGNORECASE)
EVENT = ("NodeName", "State", "Start", "Reason")


class NodeFailure(NamedTuple):
    """A failure of a host.

    Attributes:
        began: unix time.
        reason: Slurm's, or an administrator's.
        state: down, or drained.
    """

    node: str
    began: float
    reason: str
    state: str = "down"

    def __str__(self) -> str:
        began = time.strftime("%H:%M:%S", time.localtime(self.began))
        return f"Slurm has had it {self.state} since {began}: {self.reason or 'no reason given'}"


def failures(nodes: Sequence[str], since: float, until: float) -> dict[str, str]:
    """node -> what Slurm says, of those of `nodes` that failed first between these unix times.

    A node that has come back is known to accounting alone, which not every site has, and not every site shows.
    """
    if not nodes:
        return {}
    found: dict[str, NodeFailure] = {}
    drained = max(since, min(time.time(), until) - DRAINED)
    for look in (_now, _in_accounting):
        for one in look(nodes, since):
            if one.node in nodes and (since if one.state == "down" else drained) <= one.began <= until:
                found.setdefault(one.node, one)
        if any(one.state == "down" for one in found.values()):
            break
    return {node: str(one) for node, one in found.items()}


def named(answer: QueueAnswer) -> QueueAnswer:
    """The same, where a job has ended for a lost node with that node's name, if accounting remembers what nodes it
    had."""
    found = {}
    for key, job in answer.jobs.items():
        lost = _of_job(key.job_id) if job.word == "NODE_FAIL" and job.phase == "ended" else {}
        words = ", ".join(f"{node} ({said})" for node, said in lost.items())
        found[key] = msgspec.structs.replace(job, reason=f"{job.reason}: {words}") if lost else job
    return QueueAnswer(found, answer.note)


def _of_job(job_id: str) -> dict[str, str]:
    """Of all components, the nodes that failed between the job's start and its end."""
    answer = squeue.call(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "NodeList,Start,End"])
    rows = [line.split("|") for line in answer.out.splitlines()] if answer.code == 0 else []
    rows = [row for row in rows if len(row) == 3 and row[1].isdigit() and row[2].isdigit()]
    try:
        nodes = [node for row in rows for node in expand(row[0])]
    except UsageError:
        return {}
    if not nodes:
        return {}
    return failures(nodes, min(float(row[1]) for row in rows), max(float(row[2]) for row in rows) + LATER)


def _now(nodes: Sequence[str], _: float) -> Iterator[NodeFailure]:
    """Those that are down: `State=DOWN+NOT_RESPONDING ... Reason=Not responding [slurm@1795392996]`."""
    answer = squeue.call(["scontrol", "--oneliner", "show", "node", ",".join(nodes)])
    for line in answer.out.splitlines() if answer.code == 0 else ():
        name = re.match(r"NodeName=(\S+)", line)
        state = re.search(r"\bState=(\S+)", line)
        reason = re.search(r"\bReason=(.*?) \[[^\]@]*@(\d+)\]", line)
        if name and state and reason and (how := _how(state[1], reason[1])):
            yield NodeFailure(name[1], float(reason[2]), reason[1], how)


def _in_accounting(nodes: Sequence[str], since: float) -> Iterator[NodeFailure]:
    if shutil.which("sacctmgr") is None:
        return
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
    words = ["sacctmgr", "--noheader", "--parsable2", "show", "event", f"nodes={','.join(nodes)}", f"start={start}"]
    answer = squeue.call([*words, f"format={','.join(EVENT)}"])
    for line in answer.out.splitlines() if answer.code == 0 else ():
        cells = line.split("|", len(EVENT) - 1)
        if len(cells) == len(EVENT) and cells[2].isdigit() and (how := _how(cells[1], cells[3])):
            yield NodeFailure(cells[0], float(cells[2]), cells[3], how)


def _how(state: str, reason: str) -> str:
    """ "down" of `DOWN`, `DOWN*`, `DOWN+DRAIN`, `FAIL`: its jobs have been ended.  "drained" of a node that keeps its
    job, where the reason is one of a health check that has seen broken hardware.  "" of any other."""
    if re.match(r"(DOWN|FAIL)\b", state):
        return "down"
    sick = HEALTH.search(reason) and FAULT.search(reason) and not PLANNED.search(reason)
    return "drained" if "DRAIN" in state and sick else ""


# ---- node lists


def expand(nodelist: str) -> list[str]:
    """node[1-3,7] -> node1, node2, node3, node7, in Slurm's order."""
    from hostlist import BadHostlist, expand_hostlist

    try:
        return expand_hostlist(nodelist, allow_duplicates=True)
    except BadHostlist as error:
        raise UsageError(f"Slurm's node list {nodelist} cannot be read: {error}") from error
