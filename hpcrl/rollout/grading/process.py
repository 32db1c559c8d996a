"""One grading process, seen from the rollout process: what it works on, and what it uses.

Invariant: gradings that share a process run side by side; of others the first runs, and the rest wait in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

import msgspec
import psutil

from hpcrl.rollout.grading.frames import Outcome, Ready, Reply, Setup, Task
from hpcrl.rollout.worker_process import WorkerProcess


@dataclass
class Job:
    """A grading on its way.

    shares: it may run beside others in one process; alone: it must not any more, as the process that it shared was
    lost;
    attempt: how often it failed; waited: seconds since it began, cpu: the process's CPU seconds then.
    """

    task: Task
    future: asyncio.Future[list[Outcome]]
    shares: bool
    alone: bool = False
    attempt: int = 0
    waited: float = 0.0
    cpu: float = 0.0


class GradingProcess(WorkerProcess):
    """A worker.  ready: whether it has loaded the rewards; starting: seconds since it was started, until then."""

    def __init__(self, setup: Setup) -> None:
        super().__init__("hpcrl.rollout.grading.worker", setup, {"PYTHONHASHSEED": "0"})
        self.jobs: dict[int, Job] = {}
        self.ready = False
        self.starting = 0.0
        self.base = 0  # bytes resident at its start
        self._seen = psutil.Process(self.pid)

    async def listen(self) -> Ready:
        """Send what it needs and wait until it is ready.  ConnectionError if it ends before."""
        found = msgspec.msgpack.decode(await self.open(), type=Ready)
        with contextlib.suppress(psutil.Error):
            self.base = self._seen.memory_info().rss
        return found

    async def reply(self) -> Reply:
        """The next answer.  ConnectionError when the process has ended."""
        return msgspec.msgpack.decode(await self.receive(), type=Reply)

    def send(self, job: Job) -> None:
        self.jobs[job.task.id] = job
        if job.shares or len(self.jobs) == 1:
            self._begin(job)
        self.write(job.task)

    def finish(self, task: int) -> Job:
        """The job that has been answered; the next in the queue begins."""
        job = self.jobs.pop(task)
        if not job.shares and self.jobs:
            self._begin(next(iter(self.jobs.values())))
        return job

    def _begin(self, job: Job) -> None:
        job.waited = 0.0
        job.cpu = self.cpu_seconds()

    @property
    def working_on(self) -> list[Job]:
        """What runs now: all of those that share, the first of the others, which are done in order."""
        jobs = list(self.jobs.values())
        return jobs if jobs and jobs[0].shares else jobs[:1]

    def takes(self, job: Job, side_by_side: int, queue: int) -> bool:
        """Whether it has room for the job: beside others that share, behind others that do not, or alone."""
        if not self.ready or self.gone:
            return False
        if not self.jobs:
            return True
        first = next(iter(self.jobs.values()))
        if job.alone or first.alone or job.shares != first.shares:
            return False
        return len(self.jobs) < (side_by_side if job.shares else queue)

    def cpu_seconds(self) -> float:
        """CPU time that it has used, its threads included (clock_getcpuclockid(3))."""
        with contextlib.suppress(OSError):
            return time.clock_gettime((~self.pid << 3) | 2)
        return 0.0

    def memory(self) -> int:
        """Bytes resident beyond those at its start."""
        try:
            return self._seen.memory_info().rss - self.base
        except psutil.Error:
            return 0
