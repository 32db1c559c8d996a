"""The processes that run the custom function, and how long a call may take.

Invariants: the rollout process's event loop is never blocked by own code; a call whose time is up is cancelled, and a process that
does not heed that is killed; of the calls that were lost with a process one alone is charged to it, several are made again, each
alone; time that an engine works on a call's requests is not the call's.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError, UsageError
from hpcrl.rollout.async_tasks import cancel
from hpcrl.rollout.samplers.frames import ERROR, TIMEOUT, Call, Cancel, Done, Ready, Setup
from hpcrl.rollout.worker_process import WorkerProcess

POLL = 0.05  #: seconds between two looks at the calls' time
START = 120.0  #: seconds that a process may take to load the function
END = 5.0  #: seconds that killed processes may take to be gone
STARTS = 3  #: processes in a row that may fail to start
SIDE_BY_SIDE = 256  #: calls in one process at once
PATIENCE = 2.0  #: seconds that a process has to heed a cancellation


@dataclass
class Job:
    """A call on its way.

    call: makes it anew, with a session of its own; waiting: whether engines work for it; seconds: that it may take besides.
    alone: it must share its process with none; waited: seconds that it took; told: seconds since it was cancelled.
    """

    call: Callable[[int], Call]
    waiting: Callable[[], bool]
    seconds: float
    future: asyncio.Future[Done]
    alone: bool = False
    waited: float = 0.0
    told: float | None = None


class _Process(WorkerProcess):
    """One of them.  ready: whether it has loaded the function; starting: seconds since it was started, until then."""

    def __init__(self, setup: Setup) -> None:
        super().__init__("hpcrl.rollout.samplers.worker", setup)
        self.jobs: dict[int, Job] = {}
        self.ready, self.starting = False, 0.0

    def takes(self, job: Job) -> bool:
        if not self.ready or self.gone:
            return False
        alone = job.alone or any(other.alone for other in self.jobs.values())
        return not self.jobs if alone else len(self.jobs) < SIDE_BY_SIDE


class WorkerPool:
    """Made, it has started its processes; `start` waits for the first of them."""

    def __init__(self, options: Options) -> None:
        self._seconds = options.custom_generate_timeout
        self._setup = Setup(options.model_dump_json().encode())
        self._processes = [_Process(self._setup) for _ in range(options.custom_generate_num_workers)]
        self._ended: list[_Process] = []  # killed, but not yet gone
        self._waiting: deque[Job] = deque()
        self._listening: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._failures = 0  # processes that did not start, in a row
        self._first: asyncio.Future[None] | None = None
        self._broken: HpcrlError | None = None

    async def start(self) -> None:
        """Wait until a process has loaded the function.  UsageError says what is wrong with it."""
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
        deadline = time.monotonic() + END
        while not all(process.reaped() for process in self._ended) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def run(
        self, call: Callable[[int], Call], waiting: Callable[[], bool], patience: float = 1.0, alone: bool = False
    ) -> Done:
        """What comes of a call.  call: makes it for a number, each time anew; patience: times the limit of time."""
        if self._broken is not None:
            raise self._broken
        job = Job(call, waiting, self._seconds * patience, asyncio.get_running_loop().create_future(), alone)
        self._waiting.append(job)
        self._pump()
        try:
            return await job.future
        except asyncio.CancelledError:
            self._forget(job)
            raise

    # ---- the processes

    def _pump(self) -> None:
        """Give waiting calls, in order, to processes that have room."""
        while self._waiting:
            job = self._waiting[0]
            free = [] if job.future.done() else [process for process in self._processes if process.takes(job)]
            if not free and not job.future.done():
                return
            self._waiting.popleft()
            if free:
                number, process = next(self._numbers), min(free, key=lambda process: len(process.jobs))
                job.waited, job.told, process.jobs[number] = 0.0, None, job
                process.write(job.call(number))

    def _forget(self, job: Job) -> None:
        """Nobody waits for a call any more."""
        for process in self._processes:
            for number, other in process.jobs.items():
                if other is job and not process.gone:
                    job.told = job.told or 0.0
                    process.write(Cancel(number))

    def _listen(self, process: _Process) -> None:
        task = asyncio.create_task(self._serve(process))
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)

    async def _serve(self, process: _Process) -> None:
        """Take what one process says, until it ends; then put another in its place."""
        try:
            ready = msgspec.msgpack.decode(await process.open(), type=Ready)
            if ready.error:
                if ready.trace:
                    print(ready.trace, file=sys.stderr, flush=True)
                self._break(UsageError(ready.error, ready.hint))
                return
            process.ready, self._failures = True, 0
            if self._first is not None and not self._first.done():
                self._first.set_result(None)
            self._pump()
            while True:
                done = msgspec.msgpack.decode(await process.receive(), type=Done)
                job = process.jobs.pop(done.id)
                if done.failure == TIMEOUT:
                    done.text = done.text or self._late(job)
                if not job.future.done():
                    job.future.set_result(done)
                self._pump()
        except (ConnectionError, OSError):
            if process in self._processes and not process.gone:
                self._lost(process, f"ended its process ({await process.ended()})")

    def _late(self, job: Job) -> str:
        return f"took more than --custom-generate-timeout {job.seconds:g} s besides its engines"

    def _lost(self, process: _Process, text: str, failure: str = ERROR) -> None:
        """A process has ended, or was killed: what becomes of its calls, and another in its place."""
        self._processes.remove(process)
        self._ended.append(process)
        jobs, process.jobs = [job for job in process.jobs.values() if not job.future.done()], {}
        if not process.ready:
            self._failures += 1
            if self._failures >= STARTS or failure == TIMEOUT:
                self._break(
                    HpcrlError(f"the process that runs the custom function did not start: it {text}", "see the rollout log")
                )
                return
        for job in reversed(jobs):
            if len(jobs) > 1:
                job.alone = True
                self._waiting.appendleft(job)
            else:
                job.future.set_result(Done(-1, failure=failure, text=text))
        another = _Process(self._setup)
        self._processes.append(another)
        self._listen(another)
        self._pump()

    def _break(self, error: HpcrlError) -> None:
        """No call can be made."""
        self._broken = error
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
        for job in (*self._waiting, *(job for process in self._processes for job in process.jobs.values())):
            if not job.future.done():
                job.future.set_exception(error)
        self._waiting.clear()

    # ---- time

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(POLL)
            now = time.monotonic()
            passed, last = min(now - last, 1.0), now  # while this process itself stood still, nobody's time went by
            self._ended = [process for process in self._ended if not process.reaped()]
            for process in list(self._processes):
                if not process.gone:
                    self._look_at(process, passed)

    def _look_at(self, process: _Process, passed: float) -> None:
        """Cancel calls whose time is up; kill a process that does not heed it."""
        if not process.ready:
            process.starting += passed
            if process.starting > START:
                process.kill()
                self._lost(process, f"was not ready within {START:g} s", TIMEOUT)
            return
        for number, job in process.jobs.items():
            if job.told is not None:
                job.told += passed
                if job.told > PATIENCE:
                    process.kill()
                    self._lost(process, f"{self._late(job)}, and blocked its process", TIMEOUT)
                    return
            elif not job.waiting():
                job.waited += passed
                if job.waited > job.seconds:
                    job.told = 0.0
                    process.write(Cancel(number))
