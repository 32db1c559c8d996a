"""Processes that run the user's own code, rewards and functions that make samples, and the jobs that wait for one.

Invariants: the event loop is never blocked by the user's code; a process is ended with everything that it started, by
process group, and never waited for without a deadline; one that ends, or has to be killed, is replaced, and the pool's
kind decides what becomes of its jobs; where processes do not come up, every job ends with one error that says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.rollout.async_tasks import cancel
from hpcrl.toolbox.deadline import Deadline

_LENGTH = struct.Struct("<Q")


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the socket: MessagePack with its length before it."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader) -> bytes:
    """The body of the next frame.  asyncio.IncompleteReadError at the end."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


class WorkerProcess:
    """`python -m MODULE FD`, with a socket to it.  gone: whether it has ended."""

    def __init__(self, module: str, setup: msgspec.Struct, env: dict[str, str] | None = None) -> None:
        """setup: the first frame that it is sent; env: what its environment has besides ours."""
        self._setup = setup
        self.gone = False
        self._ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", module, str(theirs.fileno())]
            threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | threads | (env or {}),
                process_group=0,
            )
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def open(self) -> bytes:
        """Send the setup; the body of the answer.  ConnectionError if it ends before."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._ours, limit=1 << 22)
        self._writer.write(frame(self._setup))
        return await self.receive()

    async def receive(self) -> bytes:
        """The body of the next frame.  ConnectionError when the process has ended."""
        try:
            return await receive(self._reader)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError from error

    def write(self, message: msgspec.Struct) -> None:
        assert self._writer is not None
        self._writer.write(frame(message))

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


POLL = 0.05  #: seconds between two looks at the processes
START = 120.0  #: seconds that a process may take to load the user's code
END = 5.0  #: seconds that killed processes may take to be gone
STARTS = 3  #: processes in a row that may fail to start


class PooledJob(Protocol):
    """What somebody waits for."""

    future: asyncio.Future[Any]


class PooledProcess(Protocol):
    """One process.  ready: whether it has loaded what it runs; starting: seconds since it was started, until then;
    gone: whether it has ended; jobs: what it works on, by number."""

    ready: bool
    starting: float
    gone: bool

    @property
    def jobs(self) -> Mapping[int, PooledJob]: ...

    def kill(self) -> None: ...

    def reaped(self) -> bool: ...

    async def ended(self) -> str: ...


class Loaded(Protocol):
    """A process's first word: error is "" once it has loaded what it runs."""

    error: str
    hint: str
    trace: str


P = TypeVar("P", bound=PooledProcess)
J = TypeVar("J", bound=PooledJob)


class ProcessPool(ABC, Generic[P, J]):
    """Made, it has started its processes; `start` waits for the first of them."""

    def __init__(self, make: Callable[[], P], count: int) -> None:
        self._make = make
        self._processes = [make() for _ in range(count)]
        self._ended: list[P] = []  # killed, but not yet gone
        self._waiting: deque[J] = deque()
        self._listening: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._failures = 0  # processes that did not start, in a row
        self._first: asyncio.Future[None] | None = None
        self._broken: HpcrlError | None = None

    async def start(self) -> None:
        """Wait until a process has loaded what it runs.  UsageError says what is wrong with it."""
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

    # ---- what a kind of pool says

    @abstractmethod
    async def _open(self, process: P) -> Loaded:
        """Begin to speak with a process; its first word."""

    @abstractmethod
    async def _take(self, process: P) -> None:
        """Take a process's next word.  ConnectionError or OSError when it has ended."""

    @abstractmethod
    def _pump(self) -> None:
        """Give waiting jobs, in order, to processes that have room."""

    @abstractmethod
    def _lost(self, process: P, how: str) -> None:
        """A process has ended by itself, as `how` says: what becomes of its jobs."""

    @abstractmethod
    def _too_slow(self, process: P, text: str) -> None:
        """A process was killed because it was not ready in time."""

    @abstractmethod
    def _look_at(self, process: P, passed: float) -> None:
        """Hold a process to its limits; passed: seconds since the last look."""

    # ---- the same for all

    def _listen(self, process: P) -> None:
        task = asyncio.create_task(self._serve(process))
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)

    async def _serve(self, process: P) -> None:
        """Take what one process says, until it ends; then put another in its place."""
        try:
            loaded = await self._open(process)
            if loaded.error:
                if loaded.trace:
                    print(loaded.trace, file=sys.stderr, flush=True)
                self._break(UsageError(loaded.error, loaded.hint))
                return
            process.ready = True
            self._failures = 0
            if self._first is not None and not self._first.done():
                self._first.set_result(None)
            self._pump()
            while True:
                await self._take(process)
                self._pump()
        except (ConnectionError, OSError):
            if process in self._processes and not process.gone:
                self._lost(process, await process.ended())

    def _remove(self, process: P, at_once: bool) -> bool:
        """Count a process out; whether too many have failed to start (at_once: this one is enough)."""
        self._processes.remove(process)
        self._ended.append(process)
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
            # while this process itself stood still, nobody's time went by
            passed = min(now - last, 1.0)
            last = now
            self._ended = [process for process in self._ended if not process.reaped()]
            for process in list(self._processes):
                if process.gone:
                    continue
                if process.ready:
                    self._look_at(process, passed)
                    continue
                process.starting += passed
                if process.starting > START:
                    process.kill()
                    self._too_slow(process, f"was not ready within {START:g} s")
