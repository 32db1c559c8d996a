"""Whether a server still works, and what is left of one that died: the line of its output that says why, and its files
in shared memory.

vLLM answers /health while its core hangs, or is stopped.  So a thread asks again and again what only the core can
answer, between two of its steps.  A weight update, a hand-over or a check of weights is one step, however long: while
one is under way the server answers in its core's place, until the deadline of that call has passed.  Before anything
answers, the only difference between a process that hangs and one that compiles is that the former is stopped.

Invariants: every question has a deadline; an answer, whatever it says, is a sign of life, except the one that a call is
late; the server's output passes through to our own, line by line and unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import psutil

from hpcrl.engine.gpu_sharing import UPDATES
from hpcrl.engine.key_guard import JSON, App, Message, Receive, Scope, Send, answer
from hpcrl.engine.membership.http import CORE, IS_PAUSED, LATE, PATIENCE, TURN, Address, HttpError, request_json
from hpcrl.run.process import descendants
from hpcrl.utils.waiting import LastSign

#: calls that vLLM's core makes in one step: whole weight updates, sleep, checks of weights
CALLS = UPDATES | {"/collective_rpc", "/init_weight_transfer_engine", TURN}
GLANCE = 0.2  #: seconds after which a question that waits for the core is looked at again
EVERY = 2.0  #: seconds between two questions, or looks
ASLEEP = 30.0  #: seconds between two looks after which who looks was stopped itself; it may well wait 10 for an answer


class CoreWatchdog:
    """A thread that asks until the process ends.

    Attributes:
        sign: the core's last sign of life.
        late: of a call that the core is at for too long: which, and how long; "" if there is none.
    """

    def __init__(self, address: Address, patience: float) -> None:
        """Create one.

        Args:
            patience: seconds that one answer may take.
        """
        self.sign, self.late = LastSign(), ""
        threading.Thread(target=self._listen, args=(address, patience), daemon=True).start()

    def _listen(self, address: Address, patience: float) -> None:
        while True:
            try:
                request_json(address, "GET", CORE, patience)
                self.sign.heard()
            except HttpError as error:
                if error.status == LATE:
                    self.late = str(error).partition(f"{LATE}: ")[2]
                elif error.status is not None:
                    self.sign.heard()
            time.sleep(EVERY)


class CoreCalls:
    """The server's end: ASGI middleware that answers CORE; one in each server, behind the guard of the run's key."""

    def __init__(self, app: App) -> None:
        self.app = app
        #: under way: path, since when, until when they are waited for
        self._calls: dict[int, tuple[str, float, float]] = {}
        self._asked: set[asyncio.Task[list[Message]]] = set()  # questions that the core has not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path == CORE:
            for message in await self._answer(scope, receive):
                await send(message)
            return
        patience = _patience(scope) if path in CALLS else 0.0
        if patience:
            now = time.monotonic()
            self._calls[id(scope)] = (path, now, now + patience)
        try:
            await self.app(scope, receive, send)
        finally:
            self._calls.pop(id(scope), None)

    async def _answer(self, scope: Scope, receive: Receive) -> list[Message]:
        """The core's answer, or at once the call that it is busy with; a question that waits for the core is left."""
        if not self._calls:
            question = asyncio.ensure_future(self._ask(scope, receive))
            self._asked.add(question)
            question.add_done_callback(self._asked.discard)
            question.add_done_callback(lambda one: one.cancelled() or one.exception())  # read, or asyncio logs it
            while not question.done() and not self._calls:
                await asyncio.wait([question], timeout=GLANCE)
            if question.done():
                return question.result()
        path, since, until = max(self._calls.values(), key=lambda call: call[2])
        late = (now := time.monotonic()) > until
        text = f"{path} for {now - since:.0f} s, of {until - since:.0f}"
        return answer(LATE if late else 200, JSON, json.dumps({"error" if late else "at": text}).encode())

    async def _ask(self, scope: Scope, receive: Receive) -> list[Message]:
        said: list[Message] = []

        async def hear(message: Message) -> None:
            said.append(message)

        await self.app(scope | {"path": IS_PAUSED, "raw_path": IS_PAUSED.encode()}, receive, hear)
        return said


def _patience(scope: Scope) -> float:
    """Seconds for which the sender of a request waits for its answer; 0 if it does not say so."""
    given = {name.lower(): value for name, value in scope["headers"]}
    return float(given.get(PATIENCE.lower().encode(), 0))


class StoppedProcess:
    """How long a process below this one has been stopped, by a signal or a debugger; looks at most every EVERY seconds.

    Attributes:
        among: the processes that count.
        clock: seconds that never go back.
    """

    def __init__(
        self, among: Callable[[], Iterable[psutil.Process]] = descendants, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._among = among
        self._clock = clock
        self._looked = float("-inf")
        self._since: dict[int, float] = {}

    def longest(self) -> tuple[int, float] | None:
        """(process id, seconds) of the one that has been stopped for longest; None if none is, or it is not yet time
        to look."""
        now = self._clock()
        if now - self._looked < EVERY:
            return None
        if now - self._looked > ASLEEP:
            self._since = {}  # we were stopped ourselves, perhaps with all others
        self._looked = now
        found = [process.pid for process in self._among() if _is_stopped(process)]
        self._since = {pid: self._since.get(pid, now) for pid in found}
        return max(((pid, now - since) for pid, since in self._since.items()), key=lambda one: one[1], default=None)


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False  # it has ended


KEPT = 1000  #: lines that are kept to look for a reason
RECENT = 5.0  #: seconds before the last good health check in which a reason may already have been written

#: what vLLM puts before a message: "(EngineCore pid=7) ERROR 11-21 07:11:41 [core.py:123] "
_PREFIX = re.compile(r"^(\([^)]*\) ?)?((DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: plain causes, most telling first: our own error, in a process of vLLM's; memory; what pydantic writes below the
#: exception's own line; any exception
_CAUSES = (
    re.compile(r"^hpcrl\.errors\.\w+: \S"),
    re.compile(
        r"out of memory|OutOfMemory|Cannot allocate memory|MemoryError|can't allocate memory|less than desired"
        r"|No available memory|larger than the available KV cache",
        re.IGNORECASE,
    ),
    re.compile(r"^Value error, "),
    re.compile(r"^([\w.]*(Error|Exception|Exit|Interrupt)|[a-z_]\w*(\.\w+)*\.[A-Z]\w*): \S"),
)
#: lines that only say that something else went wrong
_EMPTY = re.compile(
    r"Engine core initialization failed|EngineDeadError|See root cause|Call to \w+ method failed|CancelledError"
    r"|KeyboardInterrupt|resource_tracker"
)
_DEATH = re.compile(r"died unexpectedly|Failed core proc")

#: files in /dev/shm that vLLM, torch and multiprocessing make for their own workers
_OURS = re.compile(r"^(vllm|sem\.|psm_|torch_|nccl-|cuda\.shm)")


class ServerLog:
    """Passes a server's output on and remembers the last lines, and when they came."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.lines: deque[tuple[float, str]] = deque(maxlen=KEPT)
        self.healthy = 0.0
        self.thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self.thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()

    def note_health(self) -> None:
        """The server is well: what it said some time before is not the reason of its death."""
        self.healthy = time.monotonic()

    def finish(self, seconds: float) -> None:
        """Wait for the end of the output, at most that long."""
        self.thread.join(seconds)

    def last_line(self) -> str:
        return next((bare(line) for _, line in reversed(list(self.lines)) if line.strip()), "nothing")

    def explain(self) -> str:
        """The line that says why, as well as that can be told."""
        recent = [line for when, line in list(self.lines) if when > self.healthy - RECENT]
        return reason(recent) or "its log does not say why"


def bare(line: str) -> str:
    """A line of output without colours and logging prefix."""
    return _PREFIX.sub("", _COLOUR.sub("", line).strip(), count=1).strip()


def reason(lines: list[str]) -> str:
    """The most telling line: a known cause, else the last exception, else a note of a death; "" if there is none."""
    plain = [text for text in map(bare, lines) if text and not _EMPTY.search(text)]
    for pattern in _CAUSES:
        if found := next((text for text in reversed(plain) if pattern.search(text)), None):
            return found
    return next((bare(line) for line in reversed(lines) if _DEATH.search(line)), "")


def leftovers(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped and that would outlive them if they were killed."""
    found: set[Path] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            found |= {Path(region.path) for region in process.memory_maps() if region.path.startswith("/dev/shm/")}
    return {path for path in found if _OURS.match(path.name) and path.exists()}
