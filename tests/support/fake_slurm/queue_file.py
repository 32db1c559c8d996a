"""The queue of the fake Slurm: every job that there ever was, in a file; and how Slurm writes nodes and times.

Invariant: whoever reads or changes the file holds its lock; the standard library alone is imported, since each of the
programs is a process of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

CPUS, GPUS = 16, 8  #: of a node
PARTITION = "main"
USED = ("RUNNING", "COMPLETING")  #: states of a job that has nodes
WAITS = ("PENDING", *USED)
KILL_WAIT = 5.0  #: seconds between SIGTERM and SIGKILL; Slurm's default is 30
AGAIN = 2.0  #: seconds that a job waits at least before it starts again; Slurm's default is two minutes


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[dict[str, Any]]:
    """The queue; what is changed in it is written at the end."""
    file = folder / "queue.json"
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = file.read_text()
        found = json.loads(before)
        yield found
        if (after := json.dumps(found)) != before:
            (folder / ".queue.json").write_text(after)
            (folder / ".queue.json").replace(file)


def fail(program: str, what: str, status: int = 1) -> NoReturn:
    """End the program with a message."""
    print(f"{program}: {what}" if program else what, file=sys.stderr)
    sys.exit(status)


def gpus_of(options: dict[str, str]) -> int:
    """How many GPUs of each node a component or a step asks for."""
    found = re.search(r"(\d+)$", options.get("gpus-per-node") or options.get("gres", "0"))
    return int(found[1]) if found else 0


# ---- nodes and times, as Slurm writes them


def expand(text: str) -> list[str]:
    """node[1-2,4],node7 -> node1, node2, node4, node7."""
    found: list[str] = []
    for name, numbers in re.findall(r"([^,\[]+)(?:\[([^]]*)\])?", text):
        for part in numbers.split(",") if numbers else []:
            first, _, last = part.partition("-")
            found += [f"{name}{number}" for number in range(int(first), int(last or first) + 1)]
        found += [] if numbers else [name]
    return found


def compress(nodes: Sequence[str]) -> str:
    """The other way round; all nodes are called node and a number."""
    numbers = sorted(int(name.removeprefix("node")) for name in nodes)
    if len(numbers) < 2:
        return "".join(nodes)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return f"node[{','.join(f'{run[0]}-{run[-1]}' if run[1:] else str(run[0]) for run in runs)}]"


def limit_of(text: str) -> float:
    """Seconds of a time limit, which Slurm rounds up to whole minutes; of MM, MM:SS, HH:MM:SS, D-HH and so on."""
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    seconds = 86400 * int(days or 0) + sum(unit * part for unit, part in zip(units, parts, strict=False))
    return 60.0 * -(-seconds // 60)


def span(seconds: float, whole: bool = False) -> str:
    """00:05:00 where whole, else 5:00."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days or hours or whole:
        return f"{days}-" * bool(days) + f"{hours:02}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"


def moment(at: float | None, none: str) -> str:
    """A time, in the form of $SLURM_TIME_FORMAT."""
    form = os.environ.get("SLURM_TIME_FORMAT", "standard")
    return (
        none if at is None else time.strftime("%Y-%m-%dT%H:%M:%S" if form == "standard" else form, time.localtime(at))
    )


# ---- whose turn it is


def schedule(queue: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Which of the jobs that wait can start now: the nodes of each of their components.  The first come first: who
    cannot be placed lets nobody pass.  Writes into each job why it waits."""
    jobs = queue["jobs"].values()
    free = {name: [CPUS, GPUS] for name in queue["nodes"]}
    for job in jobs:
        for part in job["parts"] if job["state"] in USED else ():
            for node in part["nodes"]:
                _take(free[node], part)
    found: dict[str, list[list[str]]] = {}
    ahead = False
    for job in jobs:
        if job["state"] != "PENDING":
            continue
        job["reason"] = _waits_for(job, queue["jobs"])
        if job["reason"] == "DependencyNeverSatisfied" and job["kill_on_invalid"]:
            job.update(state="CANCELLED", end=time.time())
        if job["reason"]:
            continue
        places = None if ahead else _place(free, job)
        if places is None:
            job["reason"] = "Priority" if ahead else "Resources"
            ahead = True
        else:
            found[job["id"]] = places
    return found


def _waits_for(job: dict[str, Any], jobs: dict[str, Any]) -> str:
    if job["held"]:
        return "JobHeldUser"
    if time.time() < job["begin"]:
        return "BeginTime"
    for kind, number in job["after"]:
        state = jobs[number]["state"] if number in jobs else "COMPLETED"
        if state in WAITS:
            return "Dependency"
        if kind == "afterok" and state != "COMPLETED":
            return "DependencyNeverSatisfied"
    return ""


def _place(free: dict[str, list[int]], job: dict[str, Any]) -> list[list[str]] | None:
    """Nodes for every component, each node for one of them; None if there are too few now."""
    chosen: list[list[str]] = []
    for part in job["parts"]:
        taken = {*job["excluded"], *part["excluded"], *(node for nodes in chosen for node in nodes)}
        cpus, gpus = (CPUS, GPUS) if part["exclusive"] else (part["cpus"], part["gpus"])
        fit = [n for n, (c, g) in free.items() if n not in taken and c >= cpus and g >= gpus][: part["count"]]
        if len(fit) < part["count"]:
            return None
        chosen.append(fit)
    for part, nodes in zip(job["parts"], chosen, strict=True):
        for node in nodes:
            _take(free[node], part)
    return chosen


def _take(free: list[int], part: dict[str, Any]) -> None:
    free[0] -= CPUS if part["exclusive"] else part["cpus"]
    free[1] -= GPUS if part["exclusive"] else part["gpus"]


def fits_ever(queue: dict[str, Any], parts: Iterable[dict[str, Any]]) -> bool:
    """Whether the empty cluster could hold a job."""
    job = {"parts": list(parts), "excluded": []}
    return _place({name: [CPUS, GPUS] for name in queue["nodes"]}, job) is not None
