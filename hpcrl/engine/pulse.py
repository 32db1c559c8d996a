"""Whether what the engine's supervisor has started still works.

vLLM answers /health while its core hangs, or is stopped.  So a thread asks again and again what only the core can
answer, between two of its steps.  A weight update, a turn or a check of weights is one step, however long: while one is
under way the server answers in its core's place, until the deadline of that call has passed.  Before there is anybody
to ask, all that tells a process which hangs from one that compiles is that it is stopped.
Invariant: every question has a deadline; an answer, whatever it says, is a sign of life, but for the one that a call is
late.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import psutil

from hpcrl.engine.turns.route import UPDATES
from hpcrl.run.process import descendants
from hpcrl.weights.engine_http import CORE, LATE, PATIENCE, TURN, Address, HttpError, ask

QUESTION = "/is_paused"  #: what only vLLM's core can answer
#: calls that vLLM's core makes in one step: whole weight updates, sleep, checks of weights
CALLS = UPDATES | {"/collective_rpc", "/init_weight_transfer_engine", TURN}
GLANCE = 0.2  #: seconds after which a question that waits for the core is looked at again
EVERY = 2.0  #: seconds between two questions, or looks
ASLEEP = 30.0  #: seconds between two looks after which who looks was stopped itself; it may well wait 10 for an answer


class Pulse:
    """Asks from now on, until the process ends.  patience: seconds that one answer may take."""

    def __init__(self, address: Address, patience: float) -> None:
        self._address = address
        self._patience = patience
        self._last = time.monotonic()
        self.late = ""  #: of a call that the core is at for too long: which, and how long; "" if there is none
        threading.Thread(target=self._listen, daemon=True).start()

    def silent(self, now: float) -> float:
        """Seconds since the last sign of life, by time.monotonic()."""
        return now - self._last

    def _listen(self) -> None:
        while True:
            try:
                ask(self._address, "GET", CORE, self._patience)
                self._last = time.monotonic()
            except HttpError as error:
                if error.status == LATE:
                    self.late = str(error).partition(f"{LATE}: ")[2]
                elif error.status is not None:
                    self._last = time.monotonic()
            time.sleep(EVERY)


Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class CoreCalls:
    """The server's end: ASGI middleware that answers CORE; one in each server, behind the guard of the run's key."""

    def __init__(self, app: App) -> None:
        self.app = app
        self._calls: dict[
            int, tuple[str, float, float]
        ] = {}  # under way: path, since when, until when they are waited for
        self._asked: set[asyncio.Task[None]] = set()  # questions that the core has not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == CORE:
            return await self._answer(scope, receive, send)
        patience = _patience(scope) if scope["type"] == "http" and scope["path"] in CALLS else 0.0
        if not patience:
            return await self.app(scope, receive, send)
        now = time.monotonic()
        self._calls[id(scope)] = (scope["path"], now, now + patience)
        try:
            await self.app(scope, receive, send)
        finally:
            del self._calls[id(scope)]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What the core says, or at once what it is at; a question that waits for the core is left to it."""
        said: list[MutableMapping[str, Any]] = []

        async def hear(message: MutableMapping[str, Any]) -> None:
            said.append(message)

        if not self._calls:
            question = asyncio.ensure_future(
                self.app(scope | {"path": QUESTION, "raw_path": QUESTION.encode()}, receive, hear)
            )
            self._asked.add(question)
            question.add_done_callback(self._over)
            while not question.done() and not self._calls:
                await asyncio.wait([question], timeout=GLANCE)
            if question.done():
                question.result()
                for message in said:
                    await send(message)
                return
        path, since, until = max(self._calls.values(), key=lambda call: call[2])
        late = time.monotonic() > until
        text = f"{path} for {time.monotonic() - since:.0f} s, of {until - since:.0f}"
        body = json.dumps({"error" if late else "at": text}).encode()
        head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": LATE if late else 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

    def _over(self, question: asyncio.Task[None]) -> None:
        self._asked.discard(question)
        if not question.cancelled():
            question.exception()  # whoever still waits for it gets it too


def _patience(scope: Scope) -> float:
    """Seconds for which who sends a request waits for its answer; 0 if it does not say so."""
    given = [value for name, value in scope.get("headers", ()) if name.lower() == PATIENCE.lower().encode()]
    try:
        return max(0.0, float(given[0])) if given else 0.0
    except ValueError:
        return 0.0


class Stopped:
    """How long a process below this one has been stopped, by a signal or a debugger; looks at most every EVERY seconds.

    among: the processes that count.  clock: seconds that never go back.
    """

    def __init__(
        self, among: Callable[[], Iterable[psutil.Process]] = descendants, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._among = among
        self._clock = clock
        self._looked = float("-inf")
        self._since: dict[int, float] = {}

    def longest(self) -> tuple[int, float] | None:
        """(process id, seconds) of the one that has been stopped for longest; None if nobody is, or it is not yet time
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
