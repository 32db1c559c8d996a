"""Slurm to submit real runs to, driven in one way: that of this machine (tests/support/fake_slurm), and real Slurm on the
test cluster.

    @over_queues
    def test_something(queue, tmp_path, task):
        run = queue.submit(sft(tmp_path, task), tmp_path / "run")

With `over_queues_in_core` the first of them is among the core tests.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import slurm
from tests.support.cluster import ENDED, Cluster
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import SubmittedRun, processes

CLUSTER = pytest.param("slurm", marks=pytest.mark.cluster)
over_queues = pytest.mark.parametrize(
    "queue", [pytest.param("fake", marks=pytest.mark.process), CLUSTER], indirect=True
)
over_queues_in_core = pytest.mark.parametrize(
    "queue", [pytest.param("fake", marks=[pytest.mark.process, pytest.mark.core]), CLUSTER], indirect=True
)


class Submitted(SubmittedRun):
    """A run that was submitted to a queue."""

    def __init__(self, queue: Queue, root: Path, number: str) -> None:
        super().__init__(root)
        self.queue = queue
        self.number = number

    def status(self) -> dict[str, Any]:
        return json.loads(self.queue.hpcrl("status", self.root, "--json").stdout)

    def becomes(self, phase: str, seconds: float = 240) -> dict[str, Any]:
        """Wait for a phase as `hpcrl status` has it; its whole answer."""
        deadline = time.monotonic() + seconds
        while (found := self.status())["phase"] != phase:
            assert time.monotonic() < deadline, f"{phase} not in {seconds} s, but {found}\n{self.logs()}"
            time.sleep(0.5)  # the command takes as long itself
        return found

    def output(self) -> str:
        """What the batch process has said, on one line."""
        return " ".join(" ".join(path.read_text() for path in sorted(self.root.glob("logs/job-*.out"))).split())


class Queue:
    """Slurm on the test cluster.  held: settings of a job that waits until it is released."""

    held = ("trainer.extra.hold=true",)
    shape: Mapping[str, Any] = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1}

    def __init__(self, cluster: Cluster | FakeSlurm) -> None:
        self.cluster = cluster

    def hpcrl(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return slurm.hpcrl(self.cluster, *words, check=check, timeout=300)

    def submit(self, recipe: Path, root: Path, *words: str, settings: tuple[str, ...] = ()) -> Submitted:
        job = slurm.submit(
            self.cluster, recipe, root, "--time", "30", *words, settings=("signal_margin=110", *settings)
        )
        return Submitted(self, root, str(job.number))

    def release(self, run: Submitted) -> None:
        self.cluster.run(["scontrol", "release", run.number])

    def cut(self, run: Submitted) -> None:
        """Bring the time limit of a running job within its margin."""
        slurm.Job(self.cluster, run.root, int(run.number)).limit(40)
        self.cluster.run(
            ["scancel", "--batch", "--signal=USR1", run.number]
        )  # Slurm's own warning comes up to 30 s later

    def lengthen(self, run: Submitted) -> None:
        """Give a job half an hour."""
        self.cluster.run(["scontrol", "update", f"jobid={run.number}", "timelimit=30"])

    def processes(self, run: Submitted) -> list[int]:
        """What lives of a run, anywhere."""
        everywhere = [pair for found in self.cluster.all_processes().values() for pair in found]
        return [pid for pid, argv in everywhere if str(run.root) in " ".join(argv) or "hpcrl" in " ".join(argv)]

    def status(self, run: Submitted) -> int | None:
        """The exit status of the batch process of a job that has ended; None before."""
        job = self.cluster.job(int(run.number))
        code, number = map(int, job["ExitCode"].split(":"))
        return (128 + number if number else code) if job["JobState"] in ENDED else None


class FakeSlurmQueue(Queue):
    """Slurm's programs on this machine alone (tests/support/fake_slurm)."""

    shape: Mapping[str, Any] = {"actor_num_gpus_per_node": 1}

    def cut(self, run: Submitted) -> None:
        slurm.Job(self.cluster, run.root, int(run.number)).limit(40)

    def processes(self, run: Submitted) -> list[int]:
        return processes(run.root)


@pytest.fixture
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    """The Slurm of a parameter of `over_queues`; after the test the fake one has no job left."""
    if request.param == "slurm":
        yield Queue(request.getfixturevalue("cluster"))
        return
    fake = FakeSlurm(tmp_path / "fake-slurm")
    yield FakeSlurmQueue(fake)
    assert not (left := fake.end()), left
