"""One grading process, seen from the rollout process.

Invariant: it is ended with everything it started, by process group, and never waited for without a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import psutil

from hpcrl.rollout.grading.frames import Outcome, Ready, Reply, Setup, Task, frame, receive


@dataclass
class Job:
    """A grading on its way.

    shares: it may run beside others in one process; alone: it must not any more, as the process that it shared was lost;
    attempt: how often it failed; waited: seconds since it began, cpu: the process's CPU seconds then.
    """

    task: Task
    future: asyncio.Future[list[Outcome]]
    shares: bool
    alone: bool = False
    attempt: int = 0
    waited: float = 0.0
    cpu: float = 0.0


@dataclass
class GradingProcess:
    """A worker.  ready: whether it has loaded the rewards; starting: seconds since it was started, until then; gone: whether it has ended."""

    setup: Setup
    jobs: dict[int, Job] = field(default_factory=dict)
    ready: bool = False
    starting: float = 0.0
    base: int = 0  #: bytes resident at its start
    gone: bool = False

    def __post_init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "hpcrl.rollout.grading.worker", str(theirs.fileno())]
            env = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env, process_group=0
            )
        self._writer: asyncio.StreamWriter | None = None
        self._seen = psutil.Process(self._process.pid)

    async def listen(self) -> Ready:
        """Send what it needs and wait until it is ready.  ConnectionError if it ends before."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._ours, limit=1 << 22)
        self._writer.write(frame(self.setup))
        try:
            found = msgspec.msgpack.decode(await receive(self._reader), type=Ready)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError from error
        with contextlib.suppress(psutil.Error):
            self.base = self._seen.memory_info().rss
        return found

    async def reply(self) -> Reply:
        """The next answer.  ConnectionError when the process has ended."""
        try:
            return msgspec.msgpack.decode(await receive(self._reader), type=Reply)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError from error

    def send(self, job: Job) -> None:
        assert self._writer is not None
        self.jobs[job.task.id] = job
        if job.shares or len(self.jobs) == 1:
            self._begin(job)
        self._writer.write(frame(job.task))

    def finish(self, task: int) -> Job:
        """The job that has been answered; the next in the queue begins."""
        job = self.jobs.pop(task)
        if not job.shares and self.jobs:
            self._begin(next(iter(self.jobs.values())))
        return job

    def _begin(self, job: Job) -> None:
        job.waited, job.cpu = 0.0, self.cpu_seconds()

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
            return time.clock_gettime((~self._process.pid << 3) | 2)
        return 0.0

    def memory(self) -> int:
        """Bytes resident beyond those at its start."""
        try:
            return self._seen.memory_info().rss - self.base
        except psutil.Error:
            return 0

    def kill(self) -> None:
        """End it and what it started, at once.  `reaped` says when it is gone."""
        self.gone = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._writer is not None:
            self._writer.close()
        else:
            self._ours.close()

    def reaped(self) -> bool:
        return self._process.poll() is not None

    async def ended(self) -> str:
        """How it ended by itself; what it has left behind is ended too."""
        self.gone = True
        for _ in range(50):
            if self.reaped():
                break
            await asyncio.sleep(0.01)  # its socket closes a little before it is gone
        self.kill()
        status: Any = self._process.poll()
        if status is None:
            return "it closed its socket"
        return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
