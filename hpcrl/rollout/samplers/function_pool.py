"""The processes that run the custom function, and how long a call may take.

Invariants: the rollout process's event loop is never blocked by own code; a call whose time is up is cancelled, and a
process that does not heed that is killed; of the calls that were lost with a process one alone is charged to it,
several are made again, each alone; time that an engine works on a call's requests is not the call's.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import HpcrlError
from hpcrl.rollout.worker_messages import (
    ERROR,
    TIMEOUT,
    CancelCall,
    CustomCall,
    CustomResult,
    FunctionLoaded,
    SamplerSetup,
)
from hpcrl.rollout.worker_pool import ProcessPool, WorkerProcess

SIDE_BY_SIDE = 256  #: calls in one process at once
PATIENCE = 2.0  #: seconds that a process has to heed a cancellation


@dataclass
class FunctionJob:
    """A call on its way.

    call: makes it anew, with a session of its own; waiting: whether engines work for it; seconds: that it may take
    besides.
    alone: it must share its process with none; waited: seconds that it took; told: seconds since it was cancelled.
    """

    call: Callable[[int], CustomCall]
    waiting: Callable[[], bool]
    seconds: float
    future: asyncio.Future[CustomResult]
    alone: bool = False
    waited: float = 0.0
    told: float | None = None


class _Process(WorkerProcess):
    """One of them.  ready: whether it has loaded the function; starting: seconds since it was started, until then."""

    def __init__(self, setup: SamplerSetup) -> None:
        super().__init__("hpcrl.rollout.samplers.worker", setup)
        self.jobs: dict[int, FunctionJob] = {}
        self.ready = False
        self.starting = 0.0

    def takes(self, job: FunctionJob) -> bool:
        if not self.ready or self.gone:
            return False
        alone = job.alone or any(other.alone for other in self.jobs.values())
        return not self.jobs if alone else len(self.jobs) < SIDE_BY_SIDE


class FunctionPool(ProcessPool[_Process, FunctionJob]):
    """The processes that run the custom function."""

    def __init__(self, options: Options) -> None:
        self._seconds = options.custom_generate_timeout
        setup = SamplerSetup(options.model_dump_json().encode())
        self._numbers = itertools.count()
        super().__init__(lambda: _Process(setup), options.custom_generate_num_workers)

    async def run(
        self, call: Callable[[int], CustomCall], waiting: Callable[[], bool], patience: float = 1.0, alone: bool = False
    ) -> CustomResult:
        """What comes of a call.  call: makes it for a number, each time anew; patience: times the limit of time."""
        if self._broken is not None:
            raise self._broken
        job = FunctionJob(call, waiting, self._seconds * patience, asyncio.get_running_loop().create_future(), alone)
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

    def _forget(self, job: FunctionJob) -> None:
        """Nobody waits for a call any more."""
        for process in self._processes:
            for number, other in process.jobs.items():
                if other is job and not process.gone:
                    job.told = job.told or 0.0
                    process.write(CancelCall(number))

    async def _open(self, process: _Process) -> FunctionLoaded:
        return msgspec.msgpack.decode(await process.open(), type=FunctionLoaded)

    async def _take(self, process: _Process) -> None:
        done = msgspec.msgpack.decode(await process.receive(), type=CustomResult)
        job = process.jobs.pop(done.id)
        if done.failure == TIMEOUT:
            done.text = done.text or self._late(job)
        if not job.future.done():
            job.future.set_result(done)

    def _late(self, job: FunctionJob) -> str:
        return f"took more than --custom-generate-timeout {job.seconds:g} s besides its engines"

    def _lost(self, process: _Process, how: str) -> None:
        self._charge(process, f"ended its process ({how})")

    def _too_slow(self, process: _Process, text: str) -> None:
        self._charge(process, text, TIMEOUT)

    def _charge(self, process: _Process, text: str, failure: str = ERROR) -> None:
        """A process has ended, or was killed: what becomes of its calls, and another in its place."""
        jobs = [job for job in process.jobs.values() if not job.future.done()]
        process.jobs = {}
        if self._remove(process, at_once=failure == TIMEOUT):
            self._break(
                HpcrlError(f"the process that runs the custom function did not start: it {text}", "see the rollout log")
            )
            return
        for job in reversed(jobs):
            if len(jobs) > 1:
                job.alone = True
                self._waiting.appendleft(job)
            else:
                job.future.set_result(CustomResult(-1, failure=failure, text=text))
        self._replace()

    # ---- time

    def _look_at(self, process: _Process, passed: float) -> None:
        """Cancel calls whose time is up; kill a process that does not heed it."""
        for number, job in process.jobs.items():
            if job.told is not None:
                job.told += passed
                if job.told > PATIENCE:
                    process.kill()
                    self._charge(process, f"{self._late(job)}, and blocked its process", TIMEOUT)
                    return
            elif not job.waiting():
                job.waited += passed
                if job.waited > job.seconds:
                    job.told = 0.0
                    process.write(CancelCall(number))
