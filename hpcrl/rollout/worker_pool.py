"""Processes that run the user's own code, rewards and functions that make samples, and the jobs that wait for one.

Invariants: the event loop is never blocked by the user's code; a process is ended with everything that it started, by
process group, and never waited for without a deadline; one that ends, or has to be killed, is replaced: a job that it
ran alone is charged with that, several are done again, each alone; where processes do not come up, every job ends with
one error that says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.rollout import worker_messages as messages
from hpcrl.rollout.async_tasks import cancel
from hpcrl.rollout.sandbox_tally import SandboxTally
from hpcrl.rollout.worker_messages import ERROR, LOST, TIMEOUT, SandboxReport, WorkerLoaded, frame, receive
from hpcrl.run.role import say
from hpcrl.utils.waiting import Deadline

POLL = 0.05  #: seconds between two looks at the processes
START = 120.0  #: seconds that a process may take to load the user's code
END = 5.0  #: seconds that killed processes may take to be gone
PATIENCE = 2.0  #: seconds that a process has to follow a cancellation
TRIES = 3  #: of a job whose sandbox is lost each time
MORE = 4  #: times the limits, for a job that is repeated in deterministic mode

R = TypeVar("R")
Answer = messages.GradingReply | messages.CustomResult | messages.Cancelled
_reply = msgspec.msgpack.Decoder(Answer | SandboxReport).decode


class WorkerFailure(Exception):
    """A job has cost its process, or its time was up: TIMEOUT or ERROR, and how."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        self.text = text


@dataclass(kw_only=True, eq=False)
class Job:
    """A call in a process.

    Attributes:
        request: makes what the process is sent, for a number, each time with another one.
        seconds: by the clock that it may take.
        late: says that it took more.
        shares: it is async: others run concurrently in its process, and it is cancelled before its process is killed.
        alone: it must share its process with none, as the one that it shared was lost.
        cpu_seconds: that it may take.
        paused: whether no time counts now.
        waited: seconds that have counted since it began.
        cpu_before: the process's CPU seconds when it began.
        cancelled: seconds since it was cancelled.
    """

    request: Callable[[int], msgspec.Struct]
    seconds: float
    late: str
    shares: bool
    alone: bool = False
    cpu_seconds: float = math.inf
    paused: Callable[[], bool] = lambda: False
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    waited: float = 0.0
    cpu_before: float = 0.0
    cancelled: float | None = None


async def with_retries(call: Callable[[int], Awaitable[R]], failure_of: Callable[[R], str], deterministic: bool) -> R:
    """The result of `call(1)`; called again where a sandbox was lost, which says nothing of the sample.

    In deterministic mode, what has failed is called once more, with MORE times the limits, so that load cannot change
    a result.
    """
    for _ in range(TRIES):
        result = await call(1)
        if failure_of(result) != LOST:
            break
    return await call(MORE) if deterministic and failure_of(result) else result


class WorkerProcess:
    """`python -m hpcrl.rollout.worker FD`, with a socket to it.

    Attributes:
        pid: its process id.
        jobs: what it was given, by number.
        ready: whether it has loaded what it runs.
        starting: seconds since it was started, until then.
        gone: whether it has ended.
        reader: what it says.
    """

    def __init__(self, setup: msgspec.Struct) -> None:
        """Start one; `setup` is the first frame that it is sent."""
        self._setup = setup
        self.jobs: dict[int, Job] = {}
        self.ready = False
        self.starting = 0.0
        self.gone = False
        self._ours, theirs = socket.socketpair()
        with theirs:
            env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONHASHSEED": "0"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hpcrl.rollout.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | env,
                process_group=0,
            )
        self.pid = self._process.pid
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> WorkerLoaded:
        """Send the setup and wait until it has loaded what it runs.

        Raises:
            asyncio.IncompleteReadError: if it ends before.
        """
        self.reader, self._writer = await asyncio.open_connection(sock=self._ours, limit=1 << 22)
        self.write(self._setup)
        return msgspec.msgpack.decode(await receive(self.reader), type=WorkerLoaded)

    def write(self, message: msgspec.Struct) -> None:
        assert self._writer is not None
        self._writer.write(frame(message))

    def cpu_seconds(self) -> float:
        """CPU time that it has used, its threads included (clock_getcpuclockid(3))."""
        with contextlib.suppress(OSError):
            return time.clock_gettime((~self.pid << 3) | 2)
        return 0.0

    def cancel(self, job: Job) -> None:
        """Tell it that the job's time is up, or that its result is not waited for."""
        job.cancelled = 0.0
        self.write(messages.CancelRequest(next(number for number, other in self.jobs.items() if other is job)))

    def kill(self) -> None:
        """End it and what it started, at once.  `reaped` says when it is gone."""
        self.gone = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        (self._writer or self._ours).close()

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


class WorkerPool:
    """Made, it has started its processes; `start` waits for the first of them.

    Attributes:
        sandboxes: those of its processes.
        waits: the rewards that are async, once a process has loaded them.
    """

    def __init__(self, setup: msgspec.Struct, count: int, side_by_side: int, what: str) -> None:
        """Create one.

        Args:
            setup: what each process loads.
            count: of processes.
            side_by_side: async jobs of one process at once.
            what: such a process, for errors.
        """
        self._setup = setup
        self._side_by_side = side_by_side
        self._what = what
        self.sandboxes = SandboxTally()
        self.waits: frozenset[str] = frozenset()
        self._numbers = itertools.count()
        self.processes = [WorkerProcess(setup) for _ in range(count)]
        self._ended: list[WorkerProcess] = []  # killed, but not yet gone
        self._waiting: deque[Job] = deque()
        self._listening: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._first: asyncio.Future[None] | None = None
        self._broken: HpcrlError | None = None

    async def start(self) -> None:
        """Wait until a process has loaded what it runs.

        Raises:
            UsageError: says what is wrong with it.
        """
        self._first = asyncio.get_running_loop().create_future()
        for process in self.processes:
            self._listen(process)
        self._watching = asyncio.create_task(self._watch())
        await self._first

    async def close(self) -> None:
        """End every process."""
        await cancel(self._watching, *self._listening)
        for process in self.processes:
            process.kill()
        self._ended += self.processes
        self.processes = []
        deadline = Deadline(END)
        while not (deadline.over or all(process.reaped() for process in self._ended)):
            await asyncio.sleep(0.01)

    async def run(self, job: Job) -> Any:
        """What a process answers a job's request.

        Raises:
            WorkerFailure: if it costs its process, or takes too long.
            HpcrlError: if no process comes up.
        """
        if self._broken is not None:
            raise self._broken
        self._waiting.append(job)
        self._pump()
        try:
            return await job.future
        except asyncio.CancelledError:
            for process in self.processes:
                if job.shares and job in process.jobs.values() and not process.gone:
                    process.cancel(job)
            raise

    # ---- processes and their jobs

    def _listen(self, process: WorkerProcess) -> None:
        task = asyncio.create_task(self._serve(process))
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)

    async def _serve(self, process: WorkerProcess) -> None:
        """Take what one process says, until it ends; then put another in its place."""
        try:
            loaded = await process.open()
            if loaded.error:
                if loaded.trace:
                    print(loaded.trace, file=sys.stderr, flush=True)
                self._break(UsageError(loaded.error, loaded.hint))
                return
            process.ready = True
            self.waits = frozenset(loaded.waits)
            if self._first is not None and not self._first.done():
                self._first.set_result(None)
            self._pump()
            while True:
                reply = _reply(await receive(process.reader))
                if isinstance(reply, SandboxReport):
                    self.sandboxes.add_report(process, reply)
                    continue
                _settle(process.jobs.pop(reply.id), reply)
                self._pump()
        except (asyncio.IncompleteReadError, OSError):
            if process in self.processes and not process.gone:
                self._lost(process, ERROR, f"ended its process ({await process.ended()})")

    def _pump(self) -> None:
        """Give waiting jobs, in order, to processes that have room."""
        while self._waiting:
            job = self._waiting[0]
            if job.future.done():  # it is not waited for any more
                self._waiting.popleft()
                continue
            free = [p for p in self.processes if p.ready and not p.gone and self._takes(p, job)]
            if not free:
                return
            self._waiting.popleft()
            process, number = min(free, key=lambda process: len(process.jobs)), next(self._numbers)
            job.waited = 0.0
            job.cancelled = None
            job.cpu_before = process.cpu_seconds()
            process.jobs[number] = job
            process.write(job.request(number))

    def _takes(self, process: WorkerProcess, job: Job) -> bool:
        """Whether a process has room for a job."""
        side_by_side = all(one.shares and not one.alone for one in (job, *process.jobs.values()))
        return len(process.jobs) < (self._side_by_side if side_by_side else 1)

    def _lost(self, process: WorkerProcess, kind: str, text: str) -> None:
        """A process has ended, or was killed: what becomes of its jobs, and another in its place.

        A job that ran alone is to blame; of several each is done again, alone.
        """
        jobs, process.jobs = list(process.jobs.values()), {}
        self.processes.remove(process)
        self._ended.append(process)
        self.sandboxes.forget(process)
        if not process.ready:
            self._break(HpcrlError(f"{self._what} did not start: it {text}", "see the rollout log"))
            return
        if len(jobs) > 1:
            say(f"{self._what} {text}; its {len(jobs)} calls are repeated, each alone")
            for job in jobs:
                job.alone = True
            self._waiting.extendleft(reversed(jobs))
        elif jobs and not jobs[0].future.done():
            jobs[0].future.set_exception(WorkerFailure(kind, text))
        another = WorkerProcess(self._setup)
        self.processes.append(another)
        self._listen(another)
        self._pump()

    def _break(self, error: HpcrlError) -> None:
        """Nothing can be done any more."""
        self._broken = error
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
        for job in (*self._waiting, *(job for process in self.processes for job in process.jobs.values())):
            if not job.future.done():
                job.future.set_exception(error)
        self._waiting.clear()

    # ---- limits

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(POLL)
            now = time.monotonic()
            # while this process itself was suspended, no time limit ran
            passed = min(now - last, 1.0)
            last = now
            self._ended = [process for process in self._ended if not process.reaped()]
            for process in list(self.processes):
                over = None if process.gone else _over(process, passed)
                if over is not None:
                    process.kill()
                    self._lost(process, TIMEOUT, over)


def _settle(job: Job, reply: Answer) -> None:
    """Hand over what came of a job."""
    if job.future.done():
        return
    if job.cancelled is not None:
        job.future.set_exception(WorkerFailure(TIMEOUT, job.late))
    elif isinstance(reply, messages.Cancelled):
        job.future.set_exception(WorkerFailure(ERROR, "raised CancelledError"))
    else:
        job.future.set_result(reply)


def _over(process: WorkerProcess, passed: float) -> str | None:
    """Why a process must be killed, if it must; a shared job whose time is up is cancelled first.

    Args:
        passed: seconds since the last look.
    """
    if not process.ready:
        process.starting += passed
        return f"was not ready within {START:g} s" if process.starting > START else None
    for job in process.jobs.values():
        if job.cancelled is not None:
            job.cancelled += passed
            if job.cancelled > PATIENCE:
                return f"{job.late}, and blocked its process"
            continue
        job.waited += 0.0 if job.paused() else passed
        if job.waited > job.seconds:
            if not job.shares:
                return job.late
            process.cancel(job)
        elif math.isfinite(job.cpu_seconds) and process.cpu_seconds() - job.cpu_before > job.cpu_seconds:
            return f"took more than --reward-cpu-limit {job.cpu_seconds:g} s of CPU time"
    return None
