"""Queues of a cluster that are drawn from a seed, and whether shapes start in the order that `hpcrl fit` says.

    found = try_queue(cluster, folder, seed)      # the rows of fit, what it said of them, when each really started

Jobs of 1 to 4 nodes with limits of 2 to 20 minutes fill the nodes and wait. Those that run wait for a file, so that the
queue is as fit has seen it when a row's job comes; from there on each runs one second for a minute of its limit.  A
row's job asks for what `hpcrl submit` would, and ends at once.  fit says when each row would start if it alone were
submitted: so the queue is made again for each of them.
"""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

from tests.fit.models import recipe
from tests.support import slurm
from tests.support.cluster import Cluster

LIMIT = 5  #: minutes of a row's job, the least that hpcrl takes
SETTLES = 2.5  #: seconds until all jobs have started that can
Queue = list[tuple[int, int, float]]  #: nodes, minutes of the limit, seconds that it runs
SITE = f"""
name = "drawn"
time = "{LIMIT}"
[trainer]
partition = "main"
gpus_per_node = 8
cpus_per_node = 8
mem = "1G"
"""


@dataclass(frozen=True)
class TriedRow:
    """A row: its nodes, when fit and when `sbatch --test-only` said that it would start, and when it did."""

    nodes: int
    fit: float
    slurm: float
    real: float


def try_queue(
    cluster: Cluster,
    folder: Path,
    seed: int,
    jobs: tuple[int, int] = (5, 9),
    sizes: tuple[int, ...] = (1, 2, 3, 4),
    second: float = 1.0,
) -> list[TriedRow]:
    """Draw a queue, ask fit, submit each of its rows of these sizes into such a queue and see when it starts.

    Args:
        second: seconds that a job really runs for each minute of its limit.
    """
    drawn = random.Random(seed)
    shapes = [(drawn.choice((1, 1, 2, 2, 3, 4)), drawn.randint(2, 20)) for _ in range(drawn.randint(*jobs))]
    queue = [(nodes, minutes, second * minutes) for nodes, minutes in shapes]
    path = recipe(folder)
    (folder / "site.toml").write_text(SITE)
    _fill(cluster, queue, folder / "never")
    words = ("fit", path, "--site", folder / "site.toml", "--max-nodes", "4", "--rehearse", "0", "--json")
    rows = {row["nodes"]: row for row in reversed(json.loads(slurm.hpcrl(cluster, *words).stdout)["rows"])}
    _empty(cluster)
    found = []
    for nodes, row in rows.items():
        if nodes in sizes:
            own = _moment(re.search(r"start at (\S+)", row["scheduler"])[1])
            found.append(TriedRow(nodes, row["start"], own, _waits(cluster, queue, nodes, folder / f"go-{nodes}")))
    return found


def _fill(cluster: Cluster, queue: Queue, go: Path) -> None:
    """Submit the queue's jobs, the first of which start."""
    for nodes, minutes, seconds in queue:
        _submit(cluster, nodes, minutes, f"until [ -e {go} ]; do sleep 0.1; done; sleep {seconds}")
    time.sleep(SETTLES)


def _empty(cluster: Cluster) -> None:
    """End all jobs."""
    cluster.run(["scancel", "--user", "root"])
    cluster.wait_nodes("idle", 60)


def _waits(cluster: Cluster, queue: Queue, nodes: int, go: Path) -> float:
    """Seconds from the moment at which the queue moves until a row's job starts in it; at most 0 if it goes into a
    gap."""
    _fill(cluster, queue, go)
    number = _submit(cluster, nodes, LIMIT, "true")
    time.sleep(SETTLES)
    go.touch()
    moved = time.time()
    cluster.wait_state(number, "COMPLETED", 240)
    began = _moment(cluster.job(number)["StartTime"])
    _empty(cluster)
    return began - moved


def _submit(cluster: Cluster, nodes: int, minutes: int, command: str) -> int:
    words = [f"--nodes={nodes}", "--gpus-per-node=8", "--ntasks-per-node=1", "--cpus-per-task=8", "--mem=1G"]
    return cluster.sbatch(*words, f"--time={minutes}", "--output=/dev/null", script=f"#!/bin/bash\n{command}\n")


def _moment(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def out_of_order(rows: list[TriedRow], by: str, apart: float = 30.0) -> list[tuple[TriedRow, TriedRow]]:
    """Pairs of rows that were said to start one well before the other, and really started the other way round.

    Args:
        by: who said so, "fit" or "slurm".
        apart: seconds between the two, as they were said.
    """
    return [
        (one, two)
        for one in rows
        for two in rows
        if getattr(one, by) + apart < getattr(two, by) and one.real > two.real + 1.0
    ]


def pairs_said(rows: list[TriedRow], by: str, apart: float = 30.0) -> int:
    """How many pairs it said something of."""
    return sum(getattr(one, by) + apart < getattr(two, by) for one in rows for two in rows)
