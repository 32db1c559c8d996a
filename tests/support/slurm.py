"""Help for tests that submit real runs to the test cluster: submit, wait, and what the run directory says."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.cluster import Cluster
from tests.support.runs import REPO, SubmittedRun

#: what the nodes' processes need of the environment; sbatch hands it on
ENV = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": "/tmp"}
#: nodes are to be shared between jobs, and Slurm gives a job all memory of a node unless told otherwise
MEMORY = ["trainer.mem=8G", "engine.mem=8G", "rollout.mem=4G"]


def hpcrl(
    cluster: Cluster,
    *words: str | Path,
    node: str = "head",
    check: bool = True,
    timeout: float = 240,
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> Any:
    """The command on a node, in ENV and on top of it `env`; the finished process."""
    command = [sys.executable, "-m", "hpcrl", *words]
    return cluster.run(command, node, check=check, timeout=timeout, env={**ENV, **(env or {})}, **more)


class Job(SubmittedRun):
    """A run that was submitted."""

    def __init__(self, cluster: Cluster, root: Path, number: int) -> None:
        super().__init__(root)
        self.cluster = cluster
        self.number = number

    def ends(self, state: str = "COMPLETED", seconds: float = 300) -> None:
        try:
            self.cluster.wait_state(self.number, state, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def limit(self, least: int) -> None:
        """Set the time limit to the next whole minute that leaves at least so many seconds, and less than a minute
        more."""
        hours, minutes, seconds = self.cluster.job(self.number)["RunTime"].split(":")
        elapsed = 3600 * int(hours) + 60 * int(minutes) + int(seconds)
        minutes = -(-int(elapsed + least) // 60)
        self.cluster.run(["scontrol", "update", f"jobid={self.number}", f"timelimit={minutes}"])


def submit(cluster: Cluster, recipe: Path, root: Path, *words: str, settings: tuple[str, ...] = ()) -> Job:
    """`hpcrl submit` on the head node."""
    done = hpcrl(cluster, "submit", recipe, "--run-dir", root, *words, "--set", *MEMORY, *settings)
    return Job(cluster, root, int(re.match(r"job (\d+)", done.stdout)[1]))


HURRY = "hurry"  #: a file in the run directory, with which `slow` is so no more


async def slow(options: Any, sample: Any) -> float:
    """tests.support.runs.odd_tokens, a while later: time for a test to do something in mid-run, until it says HURRY."""
    import asyncio

    from tests.support.runs import odd_tokens

    if not Path(options.run_dir, HURRY).exists():
        await asyncio.sleep(1.0)
    return await odd_tokens(options, sample)


async def very_slow(options: Any, sample: Any) -> float:
    """Ten minutes: longer than any time limit of a test."""
    import asyncio

    await asyncio.sleep(600)
    return 0.0


def very_slow_step(*_: Any) -> None:
    """The same in the middle of an optimizer step, where nobody can stop."""
    time.sleep(600)
