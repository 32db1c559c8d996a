"""The processes that run the custom function, and its calls on their way to them.

Invariant: a call whose time is up is cancelled, and a process that does not heed that is killed; time that an engine
works on a call's requests is not the call's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from hpcrl.config.options import Options
from hpcrl.rollout.worker_messages import TIMEOUT, CancelRequest, CustomCall, CustomResult, SamplerSetup
from hpcrl.rollout.worker_pool import PooledJob, ProcessPool, WorkerProcess

SIDE_BY_SIDE = 256  #: calls in one process at once
PATIENCE = 2.0  #: seconds that a process has to heed a cancellation


@dataclass(kw_only=True, eq=False)
class FunctionJob(PooledJob):
    """A call on its way.

    Attributes:
        call: makes it again, with its own session.
        in_engines: whether engines work for it.
        seconds: that it may take besides.
        cancelled_at: seconds since it was cancelled.
    """

    call: Callable[[int], CustomCall]
    in_engines: Callable[[], bool]
    seconds: float
    cancelled_at: float | None = None


class _Process(WorkerProcess[FunctionJob]):
    def takes(self, job: FunctionJob) -> bool:
        alone = job.alone or any(other.alone for other in self.jobs.values())
        return not self.jobs if alone else len(self.jobs) < SIDE_BY_SIDE

    def cancel(self, job: FunctionJob) -> None:
        """Tell it that the job's time is up, or that it is not waited for."""
        job.cancelled_at = job.cancelled_at or 0.0
        self.write(CancelRequest(next(number for number, other in self.jobs.items() if other is job)))


class FunctionPool(ProcessPool[_Process, FunctionJob]):
    """The processes that run the custom function."""

    def __init__(self, options: Options) -> None:
        self._seconds = options.custom_generate_timeout
        setup = SamplerSetup(options.model_dump_json().encode())
        what = "the process that runs the custom function"
        super().__init__(lambda: _Process(setup), 1, CustomResult, what)

    async def run(
        self,
        call: Callable[[int], CustomCall],
        in_engines: Callable[[], bool],
        patience: float = 1.0,
        alone: bool = False,
    ) -> CustomResult:
        """What comes of a call.

        Args:
            call: makes it for a number, a new one each time.
            in_engines: whether engines work for it.
            patience: times the limit of time.
            alone: it must share its process with none.
        """
        future: asyncio.Future[CustomResult] = asyncio.get_running_loop().create_future()
        job = FunctionJob(
            future=future, alone=alone, call=call, in_engines=in_engines, seconds=self._seconds * patience
        )
        try:
            return await self.submit(job)
        except asyncio.CancelledError:
            for process in self._processes:
                if job in process.jobs.values() and not process.gone:
                    process.cancel(job)
            raise

    # ---- the processes

    def _request(self, job: FunctionJob, number: int) -> CustomCall:
        job.cancelled_at = None
        return job.call(number)

    def _settle(self, job: FunctionJob, reply: CustomResult) -> None:
        if reply.failure == TIMEOUT:
            reply.text = reply.text or self._late(job)
        job.future.set_result(reply)

    def _blame(self, job: FunctionJob, failure: str, text: str) -> None:
        job.future.set_result(CustomResult(-1, failure=failure, text=text))

    def _late(self, job: FunctionJob) -> str:
        return f"took more than {job.seconds:g} s besides its engines, a limit that --timeout-factor scales"

    def _over(self, process: _Process, job: FunctionJob, passed: float) -> tuple[str, str] | None:
        """Cancel a call whose time is up; the process is over a limit if it does not heed that."""
        if job.cancelled_at is not None:
            job.cancelled_at += passed
            return (TIMEOUT, f"{self._late(job)}, and blocked its process") if job.cancelled_at > PATIENCE else None
        if not job.in_engines():
            job.waited += passed
            if job.waited > job.seconds:
                process.cancel(job)
        return None
