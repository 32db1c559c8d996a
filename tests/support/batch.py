"""Schedulers to submit real runs to, all driven in one way: a Slurm of this machine (tests/support/fake_slurm), Slurm on
the test cluster, and tests/support/local_queue.py.

    @over_queues
    def test_something(queue, tmp_path, task):
        run = queue.submit(sft(tmp_path, task), tmp_path / "run")

A scheduler that hpcrl is to speak to gets a `Queue` here, a line in `over_queues`, and has to pass
tests/whole_runs/test_schedulers.py.  With `over_queues_in_core` the first of them is among the core tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest

from tests.support import local_queue, slurm
from tests.support.cluster import ENDED, Cluster
from tests.support.fake_slurm import FakeSlurm
from tests.support.runs import REPO, SubmittedRun, processes

ELSEWHERE = [pytest.param("local", marks=pytest.mark.soak), pytest.param("slurm", marks=pytest.mark.cluster)]
over_queues = pytest.mark.parametrize(
    "queue", [pytest.param("fake", marks=pytest.mark.process), *ELSEWHERE], indirect=True
)
over_queues_in_core = pytest.mark.parametrize(
    "queue", [pytest.param("fake", marks=[pytest.mark.process, pytest.mark.core]), *ELSEWHERE], indirect=True
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


class Queue(Protocol):
    """A scheduler, and what its administrator does.  held: settings of a job that waits until it is released."""

    name: str
    title: str
    held: tuple[str, ...]
    shape: Mapping[str, Any]

    def hpcrl(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]: ...

    def submit(self, recipe: Path, root: Path, *words: str, settings: tuple[str, ...] = ()) -> Submitted: ...

    def release(self, run: Submitted) -> None: ...

    def cut(self, run: Submitted) -> None:
        """Bring the time limit of a running job within its margin."""

    def lengthen(self, run: Submitted) -> None:
        """Give a job half an hour."""

    def processes(self, run: Submitted) -> list[int]:
        """What lives of a run, anywhere."""

    def status(self, run: Submitted) -> int | None:
        """The exit status of the batch process of a job that has ended; None where that is not told."""


class LocalQueue:
    """The queue of tests/support/local_queue.py, in a directory."""

    name = local_queue.NAME
    title = local_queue.LocalQueue.title
    held = ("hold=true",)
    shape: Mapping[str, Any] = {"actor_num_gpus_per_node": 1}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "queue").mkdir(parents=True)
        (folder / "site.toml").write_text(f'scheduler = "{self.name}"\ntime = "30"\nsignal_margin = 60\n')
        local_queue.register(folder / "installed")
        self.env = os.environ | {
            "LOCAL_QUEUE": str(folder / "queue"),
            "PYTHONPATH": f"{folder / 'installed'}:{REPO}",
            "HPCRL_SITE": str(folder / "site.toml"),
            "OMP_NUM_THREADS": "1",
        }

    def hpcrl(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hpcrl", *map(str, words)]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=300, cwd=self.folder)
        assert done.returncode == 0 or not check, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def submit(self, recipe: Path, root: Path, *words: str, settings: tuple[str, ...] = ()) -> Submitted:
        more = ("--set", *settings) if settings else ()
        done = self.hpcrl("submit", recipe, "--run-dir", root, *words, *more)
        return Submitted(self, root, re.match(r"job (\d+)", done.stdout)[1])

    def _change(self, run: Submitted, **values: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LOCAL_QUEUE", self.env["LOCAL_QUEUE"])
            local_queue.change(run.number, **values)

    def _job(self, run: Submitted) -> dict[str, Any]:
        return json.loads((self.folder / "queue" / "queue.json").read_text())[run.number]

    def release(self, run: Submitted) -> None:
        self._change(run, state="waiting")

    def cut(self, run: Submitted) -> None:
        self._change(run, limit=time.time() - self._job(run)["started"] + 40)

    def lengthen(self, run: Submitted) -> None:
        self._change(run, limit=1800.0)

    def processes(self, run: Submitted) -> list[int]:
        return processes(run.root)

    def status(self, run: Submitted) -> int | None:
        return None

    def end(self, seconds: float = 15) -> list[str]:
        """Give every job a while to end, then end it; what had to be ended, or lives on."""
        file = self.folder / "queue" / "queue.json"
        deadline = time.monotonic() + seconds
        left = []
        for number, job in (json.loads(file.read_text()) if file.exists() else {}).items():
            with contextlib.suppress(psutil.NoSuchProcess):
                keeper = psutil.Process(job["keeper"])
                try:
                    keeper.wait(max(0.0, deadline - time.monotonic()))
                except psutil.TimeoutExpired:
                    left.append(f"job {number} is {job['state']}")
                    self._change(Submitted(self, Path(), number), wish="kill")
                    keeper.wait(20)
        return left


class SlurmQueue:
    """Slurm on the test cluster."""

    name = "slurm"
    title = "Slurm"
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
        slurm.Job(self.cluster, run.root, int(run.number)).limit(40)
        self.cluster.run(
            ["scancel", "--batch", "--signal=USR1", run.number]
        )  # Slurm's own warning comes up to 30 s later

    def lengthen(self, run: Submitted) -> None:
        self.cluster.run(["scontrol", "update", f"jobid={run.number}", "timelimit=30"])

    def processes(self, run: Submitted) -> list[int]:
        everywhere = [pair for found in self.cluster.all_processes().values() for pair in found]
        return [pid for pid, argv in everywhere if str(run.root) in " ".join(argv) or "hpcrl" in " ".join(argv)]

    def status(self, run: Submitted) -> int | None:
        job = self.cluster.job(int(run.number))
        code, number = map(int, job["ExitCode"].split(":"))
        return (128 + number if number else code) if job["JobState"] in ENDED else None


class FakeSlurmQueue(SlurmQueue):
    """Slurm's programs on this machine alone (tests/support/fake_slurm)."""

    shape: Mapping[str, Any] = {"actor_num_gpus_per_node": 1}

    def cut(self, run: Submitted) -> None:
        slurm.Job(self.cluster, run.root, int(run.number)).limit(40)

    def processes(self, run: Submitted) -> list[int]:
        return processes(run.root)


@pytest.fixture
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    """The scheduler of a parameter of `over_queues`; after the test it has no job left."""
    if request.param == "slurm":
        yield SlurmQueue(request.getfixturevalue("cluster"))
        return
    if request.param == "fake":
        fake = FakeSlurm(tmp_path / "fake-slurm")
        yield FakeSlurmQueue(fake)
        assert not (left := fake.end()), left
        return
    found = LocalQueue(tmp_path / "local-queue")
    yield found
    assert not (left := found.end()), left
