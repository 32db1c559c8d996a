"""A worker process: runs the user's own code, rewards or a function that makes samples, until its socket closes.

    python -m hpcrl.rollout.worker FD        (started by worker_pool.py; FD is its end of a socket pair)

Invariants: it dies with the rollout process; what the user's code prints goes to the rollout's log and never into the
protocol; what is wrong with the code itself (its name, its module, its signature) is the answer to the first message,
what is wrong with one request is that request's; a process of built-in rewards alone reads no response before it is
confined, where it can be.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from hpcrl.config.custom_functions import trace_of
from hpcrl.errors import HpcrlError
from hpcrl.rollout.worker_messages import (
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
from hpcrl.sandbox.confine import NotBegun, confine, view_of_python
from hpcrl.sandbox.nodes.location import follow
from hpcrl.sandbox.system_calls import reason

REPORT = 1.0  #: seconds between two looks at this process's sandboxes

_setup = msgspec.msgpack.Decoder(GradingSetup | SamplerSetup).decode
_request = msgspec.msgpack.Decoder(GradingTask | CustomCall | CancelRequest).decode


class UserCode(Protocol):
    """What a worker has loaded.

    Attributes:
        waits: the rewards that are async.
    """

    waits: list[str]

    def shares(self, request: GradingTask | CustomCall) -> bool:
        """Whether other requests may run concurrently."""

    async def answer(self, request: GradingTask | CustomCall) -> bytes:
        """The reply as a frame, whatever the user's code does; it ends soon after it was cancelled."""

    async def close(self) -> None: ...


def load(setup: GradingSetup | SamplerSetup) -> UserCode:
    """UsageError, or whatever the user's module raises."""
    if isinstance(setup, GradingSetup):
        from hpcrl.rollout.grading.grader import Grader

        return Grader(setup)
    from hpcrl.rollout.samplers.function_runner import FunctionRunner

    return FunctionRunner(setup)


async def serve(fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd), limit=1 << 22)
    setup = _setup(await receive(reader))
    try:
        follow()
        code = load(setup)
    except BaseException as error:  # noqa: BLE001  (the user's module may raise anything)
        what = error.what if isinstance(error, HpcrlError) else f"{type(error).__name__}: {error}"
        hint = error.hint if isinstance(error, HpcrlError) else ""
        trace = "" if error.__cause__ is None else trace_of(error.__cause__)
        writer.write(frame(WorkerLoaded(error=what, hint=hint, trace=trace)))
        await writer.drain()
        return
    unconfined = _confine() if isinstance(setup, GradingSetup) and setup.confined else ""
    writer.write(frame(WorkerLoaded(waits=code.waits, unconfined=unconfined)))
    try:
        await _take_requests(code, reader, writer)
    finally:
        await code.close()


def _confine() -> str:
    """Give up files, networks and other processes; why that was not possible, or "".

    It is tried in a process of its own first: this one must not be left with half of it, and ends if it is (OSError).
    """
    if len(os.listdir("/proc/self/task")) > 1:  # the process in which it is tried would have one all the same
        return "something that was loaded into their process has started a thread"
    view = view_of_python()
    said, telling = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            confine(view)
        except OSError as error:
            os.write(telling, reason(error).encode())
        os._exit(0)
    os.close(telling)
    why = os.read(said, 4096).decode(errors="replace")
    os.close(said)
    os.waitpid(child, 0)
    if not why:
        try:
            confine(view)
        except NotBegun as error:  # such as the last namespace that the user may have
            why = reason(error)
    return why


async def _take_requests(code: UserCode, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer what comes until the socket closes."""
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(request: GradingTask | CustomCall) -> None:
        reply = await code.answer(request)
        writer.write(report_frame() + reply)
        await writer.drain()

    async def report() -> None:
        while True:
            await asyncio.sleep(REPORT)
            writer.write(report_frame())
            await writer.drain()

    reporting = asyncio.create_task(report())
    try:
        await _take_each(code, reader, running, answer)
    finally:
        reporting.cancel()


async def _take_each(
    code: UserCode,
    reader: asyncio.StreamReader,
    running: dict[int, asyncio.Task[None]],
    answer: Callable[[GradingTask | CustomCall], Coroutine[Any, Any, None]],
) -> None:
    while True:
        request = _request(await receive(reader))
        if isinstance(request, CancelRequest):
            if task := running.get(request.id):
                task.cancel()
        elif code.shares(request):
            task = asyncio.create_task(answer(request))
            running[request.id] = task
            task.add_done_callback(lambda _, number=request.id: running.pop(number, None))
        else:
            await answer(request)


def main() -> None:
    die_with_parent()
    use_inherited_code()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.dup2(2, 1)  # what the user's code prints
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        asyncio.run(serve(int(sys.argv[1])))
    sys.stderr.flush()
    os._exit(0)  # threads that the user's code has left behind are not waited for


if __name__ == "__main__":
    main()
