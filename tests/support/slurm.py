"""Help for tests that submit real runs to the test cluster: submit, wait, and what the run directory says."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.cluster import Cluster
from tests.support.runs import REPO, metrics

#: what the nodes' processes need of the environment; sbatch hands it on
ENV = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": "/tmp"}
#: nodes are to be shared between jobs, and Slurm gives a job all memory of a node unless told otherwise
MEMORY = ["trainer.mem=8G", "engine.mem=8G", "rollout.mem=4G"]


def hpcrl(cluster: Cluster, *words: str | Path, node: str = "head", check: bool = True, timeout: float = 60, **more: Any) -> Any:
    """The command on a node; the finished process."""
    return cluster.run([sys.executable, "-m", "hpcrl", *words], node, check=check, timeout=timeout, env=ENV, **more)


class Job:
    """A run that was submitted."""

    def __init__(self, cluster: Cluster, root: Path, number: int) -> None:
        self.cluster, self.root, self.number = cluster, root, number

    def until(self, condition: Callable[[], bool], seconds: float = 240) -> None:
        """Wait for `condition`; AssertionError with the run's logs if it does not come."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s in vain\n{self.logs()}"
            time.sleep(0.1)

    def ends(self, state: str = "COMPLETED", seconds: float = 300) -> None:
        try:
            self.cluster.wait_state(self.number, state, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def attempt(self) -> int:
        return max((int(p.name) for p in self.root.glob("attempts/*")), default=-1)

    def steps(self) -> int:
        return len(metrics(self.root))

    def running(self, attempt: int) -> bool:
        """Whether that attempt has trained a step of its own: its trainer is up, and metrics have been written since."""
        peer = self.root / "attempts" / str(attempt) / "peers" / "trainer-0.json"
        return peer.exists() and self.steps() > json.loads(peer.read_text())["start"]

    def limit(self, least: int) -> None:
        """Set the time limit to the next whole minute that leaves at least so many seconds."""
        hours, minutes, seconds = self.cluster.job(self.number)["RunTime"].split(":")
        elapsed = 3600 * int(hours) + 60 * int(minutes) + int(seconds)
        minutes = -(-int(elapsed + least) // 60)
        self.cluster.run(["scontrol", "update", f"jobid={self.number}", f"timelimit={minutes}"])

    def state(self) -> dict[str, Any]:
        return json.loads((self.root / "state.json").read_text())

    def logs(self) -> str:
        files = [*sorted(self.root.glob("logs/*.out")), *sorted(self.root.glob("logs/attempt-*/*.log"))]
        return "\n".join(f"--- {p.relative_to(self.root)}\n{p.read_text(errors='replace')[-2500:]}" for p in files)


def submit(cluster: Cluster, recipe: Path, root: Path, *words: str, settings: tuple[str, ...] = ()) -> Job:
    """`hpcrl submit` on the head node."""
    done = hpcrl(cluster, "submit", recipe, "--run-dir", root, *words, "--set", *MEMORY, *settings)
    return Job(cluster, root, int(re.match(r"job (\d+)", done.stdout)[1]))


async def slow(options: Any, sample: Any) -> float:
    """tests.support.runs.odd_tokens, a while later: time for a test to do something in mid-run."""
    import asyncio

    from tests.support.runs import odd_tokens

    await asyncio.sleep(1.0)
    return await odd_tokens(options, sample)
