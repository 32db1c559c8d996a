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
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.rollout.async_tasks import cancel
from hpcrl.rollout.sandbox_tally import SandboxTally
from hpcrl.rollout.worker_messages import ERROR, TIMEOUT, GradingSetup, SandboxReport, WorkerLoaded, frame, receive
from hpcrl.rollout.worker_output import copy_output
from hpcrl.utils.deadline import Deadline

POLL = 0.05  #: seconds between two looks at the processes
START = 120.0  #: seconds that a process may take to load the user's code
END = 5.0  #: seconds that killed processes may take to be gone
STARTS = 3  #: processes in a row that may fail to start


@dataclass(kw_only=True, eq=False)
class PooledJob:
    """What a caller waits for.

    Attributes:
        alone: it must share its process with none, as the one that it shared was lost.
        waited: seconds since it began.
    """

    future: asyncio.Future[Any]
    alone: bool = False
    waited: float = 0.0


J = TypeVar("J", bound=PooledJob)


class WorkerProcess(Generic[J]):
    """`python -m hpcrl.rollout.worker FD`, with a socket to it.

    jobs: what it was given, by number
    ready: whether it has loaded what it runs
    starting: seconds since it was started, until then
    gone: whether it has ended
    """

    def __init__(self, setup: msgspec.Struct) -> None:
        """Create one.

        Args:
            setup: the first frame that it is sent.
        """
        self._setup = setup
        self.jobs: dict[int, J] = {}
        self.ready = False
        self.starting = 0.0
        self.gone = False
        self._ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "hpcrl.rollout.worker", str(theirs.fileno())]
            confined = isinstance(setup, GradingSetup) and setup.confined
            env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONHASHSEED": "0"}
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE if confined else None,
                env=os.environ | env,
                process_group=0,
            )
        if self._process.stderr is not None:
            copy_output(self._process.stderr)
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def open(self) -> WorkerLoaded:
        """Send the setup and wait until it has loaded what it runs.

        Raises:
            ConnectionError: if it ends before.
        """
        self._reader, self._writer = await asyncio.open_connection(sock=self._ours, limit=1 << 22)
        self._writer.write(frame(self._setup))
        return msgspec.msgpack.decode(await self.receive(), type=WorkerLoaded)

    async def receive(self) -> bytes:
        """The body of the next frame.

        Raises:
            ConnectionError: when the process has ended.
        """
        try:
            return await receive(self._reader)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError from error

    def write(self, message: msgspec.Struct) -> None:
        assert self._writer is not None
        self._writer.write(frame(message))

    # ---- its jobs

    def takes(self, job: J) -> bool:
        """Whether it has room for the job."""
        raise NotImplementedError

    def running(self) -> list[J]:
        """Those of its jobs that have begun."""
        return list(self.jobs.values())

    def add(self, number: int, job: J) -> None:
        """It was given the job."""
        job.waited = 0.0
        self.jobs[number] = job

    def finish(self, number: int) -> J:
        """The job that it has answered."""
        return self.jobs.pop(number)

    # ---- its end

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


P = TypeVar("P", bound=WorkerProcess[Any])


class ProcessPool(ABC, Generic[P, J]):
    """Made, it has started its processes; `start` waits for the first of them.

    Attributes:
        sandboxes: those of its processes.
    """

    def __init__(self, make: Callable[[], P], count: int, reply: type, what: str) -> None:
        """Create one.

        Args:
            make: starts a process.
            reply: what it answers a request with, which has the request's `id`.
            what: such a process, for errors.
        """
        self._make = make
        self._reply = reply
        self._what = what
        self.sandboxes = SandboxTally()
        self._numbers = itertools.count()
        self._processes = [make() for _ in range(count)]
        self._ended: list[P] = []  # killed, but not yet gone
        self._waiting: deque[J] = deque()
        self._listening: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._failures = 0  # processes that did not start, in a row
        self._first: asyncio.Future[None] | None = None
        self._broken: HpcrlError | None = None

    async def start(self) -> None:
        """Wait until a process has loaded what it runs.

        Raises:
            UsageError: says what is wrong with it.
        """
        self._first = asyncio.get_running_loop().create_future()
        for process in self._processes:
            self._listen(process)
        self._watching = asyncio.create_task(self._watch())
        await self._first

    async def close(self) -> None:
        """End every process."""
        await cancel(self._watching, *self._listening)
        for process in self._processes:
            process.kill()
        self._ended += self._processes
        self._processes = []
        deadline = Deadline(END)
        while not all(process.reaped() for process in self._ended) and not deadline.over:
            await asyncio.sleep(0.01)

    async def submit(self, job: J) -> Any:
        """What comes of a job.

        Raises:
            HpcrlError: if no process comes up.
        """
        if self._broken is not None:
            raise self._broken
        self._waiting.append(job)
        self._pump()
        return await job.future

    # ---- what a kind of pool says

    @abstractmethod
    def _request(self, job: J, number: int) -> msgspec.Struct:
        """What a process is sent for a job; each time that it is begun, with another number."""

    @abstractmethod
    def _settle(self, job: J, reply: Any) -> None:
        """Hand over what came of a job, or have it repeated."""

    @abstractmethod
    def _blame(self, job: J, failure: str, text: str) -> None:
        """A job has cost its process: hand that over, or have it repeated.

        Args:
            failure: TIMEOUT or ERROR.
        """

    @abstractmethod
    def _over(self, process: P, job: J, passed: float) -> tuple[str, str] | None:
        """(how it fails, why) of a job that is over a limit.

        Args:
            passed: seconds since the last look.
        """

    def _opened(self, process: P, loaded: WorkerLoaded) -> None:
        """A process has loaded what it runs."""

    # ---- the same for all

    def _listen(self, process: P) -> None:
        task = asyncio.create_task(self._serve(process))
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)

    async def _serve(self, process: P) -> None:
        """Take what one process says, until it ends; then put another in its place."""
        try:
            loaded = await process.open()
            if loaded.error:
                if loaded.trace:
                    print(loaded.trace, file=sys.stderr, flush=True)
                self._break(UsageError(loaded.error, loaded.hint))
                return
            process.ready = True
            self._opened(process, loaded)
            self._failures = 0
            if self._first is not None and not self._first.done():
                self._first.set_result(None)
            self._pump()
            while True:
                reply = msgspec.msgpack.decode(await process.receive(), type=self._reply | SandboxReport)
                if isinstance(reply, SandboxReport):
                    self.sandboxes.add_report(process, reply)
                    continue
                job = process.finish(reply.id)
                if not job.future.done():
                    self._settle(job, reply)
                self._pump()
        except (ConnectionError, OSError):
            if process in self._processes and not process.gone:
                self._lost(process, ERROR, f"ended its process ({await process.ended()})")

    def _pump(self) -> None:
        """Give waiting jobs, in order, to processes that have room."""
        while self._waiting:
            job = self._waiting[0]
            if job.future.done():  # it is not waited for any more
                self._waiting.popleft()
                continue
            free = [p for p in self._processes if p.ready and not p.gone and p.takes(job)]
            if not free:
                return
            self._waiting.popleft()
            process, number = min(free, key=lambda process: len(process.jobs)), next(self._numbers)
            process.add(number, job)
            process.write(self._request(job, number))

    def _lost(self, process: P, failure: str, text: str) -> None:
        """A process has ended, or was killed: what becomes of its jobs, and another in its place.

        A job that ran alone is to blame; of several each is done again, alone; those that had not begun wait again.
        """
        begun = process.running()
        others = [job for job in process.jobs.values() if job not in begun]
        process.jobs = {}
        if self._remove(process, at_once=failure == TIMEOUT):
            self._break(HpcrlError(f"{self._what} did not start: it {text}", "see the rollout log"))
            return
        self._waiting.extendleft(reversed(others))
        if len(begun) > 1:
            for job in begun:
                job.alone = True
            self._waiting.extendleft(reversed(begun))
        elif begun and not begun[0].future.done():
            self._blame(begun[0], failure, text)
        self._replace()

    def _remove(self, process: P, at_once: bool) -> bool:
        """Count a process out; whether too many have failed to start (at_once: this one is enough)."""
        self._processes.remove(process)
        self._ended.append(process)
        self.sandboxes.forget(process)
        if process.ready:
            return False
        self._failures += 1
        return self._failures >= STARTS or at_once

    def _replace(self) -> None:
        """Put another process into the place of one that is gone."""
        another = self._make()
        self._processes.append(another)
        self._listen(another)
        self._pump()

    def _break(self, error: HpcrlError) -> None:
        """Nothing can be done any more."""
        self._broken = error
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
        for job in (*self._waiting, *(job for process in self._processes for job in process.jobs.values())):
            if not job.future.done():
                job.future.set_exception(error)
        self._waiting.clear()

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(POLL)
            now = time.monotonic()
            # while this process itself was suspended, no time limit ran
            passed = min(now - last, 1.0)
            last = now
            self._ended = [process for process in self._ended if not process.reaped()]
            for process in list(self._processes):
                if process.gone:
                    continue
                if process.ready:
                    self._hold_to_limits(process, passed)
                    continue
                process.starting += passed
                if process.starting > START:
                    process.kill()
                    self._lost(process, TIMEOUT, f"was not ready within {START:g} s")

    def _hold_to_limits(self, process: P, passed: float) -> None:
        """Kill a process that is over a limit."""
        for job in process.running():
            if over := self._over(process, job, passed):
                process.kill()
                self._lost(process, *over)
                return
