"""A worker process: runs the user's own code, rewards or a function that makes samples, until its socket closes.

    python -m hpcrl.rollout.worker FD        (started by worker_pool.py; FD is its end of a socket pair)

Invariants: it dies with the rollout process; what the user's code prints goes to the rollout's log and never into the
protocol; what is wrong with the code itself (its name, its module, its signature) is the answer to the first message,
what is wrong with one request is that request's.  A plain function is called in the main thread, to which signals go,
while no event loop runs: it may call asyncio.run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
from typing import Any, Protocol

import msgspec

from hpcrl.config.custom_functions import trace_of
from hpcrl.errors import HpcrlError
from hpcrl.rollout.worker_messages import (
    Cancelled,
    CancelRequest,
    CustomCall,
    GradingSetup,
    GradingTask,
    SamplerSetup,
    WorkerLoaded,
    frame,
    receive,
    report_frame,
)
from hpcrl.run.code_files import use_inherited_code
from hpcrl.run.process import die_with_parent
from hpcrl.sandbox.nodes.location import follow

REPORT = 1.0  #: seconds between two looks at this process's sandboxes

_setup = msgspec.msgpack.Decoder(GradingSetup | SamplerSetup).decode
_request = msgspec.msgpack.Decoder(GradingTask | CustomCall | CancelRequest).decode


class UserCode(Protocol):
    """What a worker has loaded.

    Attributes:
        waits: the rewards that are async.
    """

    waits: list[str]

    def shares(self, request: Any) -> bool:
        """Whether other requests may run concurrently: it calls nothing plain."""

    def call(self, request: Any) -> Any:
        """What the user's functions return; of an async one what is to be awaited."""

    async def answer(self, request: Any, called: Any) -> bytes:
        """The reply as a frame, whatever the user's code does; it ends soon after it was cancelled.

        Args:
            called: what `call` has returned.
        """


def load(setup: GradingSetup | SamplerSetup) -> UserCode:
    """UsageError, or whatever the user's module raises."""
    if isinstance(setup, GradingSetup):
        from hpcrl.rollout.grading.grader import Grader

        return Grader(setup)
    from hpcrl.rollout.samplers.function_runner import FunctionRunner

    return FunctionRunner(setup)


class RequestLoop:
    """Takes requests from a socket."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._running: dict[int, asyncio.Task[None]] = {}
        self.code: UserCode

    async def open(self) -> bool:
        """Load the user's code; whether it can be used."""
        self._reader, self._writer = await asyncio.open_connection(sock=socket.socket(fileno=self._fd), limit=1 << 22)
        setup = _setup(await receive(self._reader))
        try:
            follow()
            self.code = load(setup)
        except BaseException as error:  # noqa: BLE001  (the user's module may raise anything)
            known = error if isinstance(error, HpcrlError) else HpcrlError(f"{type(error).__name__}: {error}")
            trace = "" if error.__cause__ is None else trace_of(error.__cause__)
            await self._send(frame(WorkerLoaded(error=known.what, hint=known.hint, trace=trace)))
            return False
        await self._send(frame(WorkerLoaded(waits=self.code.waits)))
        self._reporting = asyncio.create_task(self._report())
        return True

    async def next_plain(self) -> GradingTask:
        """The next request that shares this process with none; until it comes, those that do share it are answered.

        Raises:
            asyncio.IncompleteReadError: when the socket closes.
        """
        while True:
            request = _request(await receive(self._reader))
            if isinstance(request, CancelRequest):
                await asyncio.sleep(0)  # one that has not begun would end without an answer
                if task := self._running.get(request.id):
                    task.cancel()
            elif self.code.shares(request):
                task = asyncio.create_task(self.answer(request, self.code.call(request)))
                self._running[request.id] = task
                task.add_done_callback(lambda _, number=request.id: self._running.pop(number, None))
            else:
                assert isinstance(request, GradingTask)
                return request

    async def answer(self, request: GradingTask | CustomCall, called: Any) -> None:
        try:
            reply = await self.code.answer(request, called)
        except asyncio.CancelledError:
            reply = frame(Cancelled(request.id))
        await self._send(report_frame() + reply)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT)
            await self._send(report_frame())

    async def _send(self, frames: bytes) -> None:
        self._writer.write(frames)
        await self._writer.drain()


def main() -> None:
    die_with_parent()
    use_inherited_code()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.dup2(2, 1)  # what the user's code prints
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    worker = RequestLoop(int(sys.argv[1]))
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        if loop.run_until_complete(worker.open()):
            while True:
                task = loop.run_until_complete(worker.next_plain())
                loop.run_until_complete(worker.answer(task, worker.code.call(task)))
    sys.stderr.flush()
    os._exit(0)  # tasks and threads that the user's code has left behind are not waited for


if __name__ == "__main__":
    main()
