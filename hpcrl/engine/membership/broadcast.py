"""Engines as the trainer sees them: one call to each at the same time, watched until all have answered.

Invariants: every call has a deadline; while one is pending the engines' health and the run's error file are checked,
because vLLM never answers a pending call once its engine core has died; an error names engine, host and phase.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, NoReturn

from hpcrl.engine.membership.http import GLANCE_SECONDS, HEALTH, SILENT, Address, HttpError, request_json, status
from hpcrl.engine.membership.registry import Engine
from hpcrl.errors import DeadlineError, PeerError
from hpcrl.plan import Plan
from hpcrl.run.engine_files import end_of
from hpcrl.run.peers import EnginePeer, wait_for
from hpcrl.run.rundir import RunDir
from hpcrl.transport.auth import http_key
from hpcrl.utils.waiting import Deadline

GLANCE = 0.5  #: seconds between two looks at the health of engines that have not answered
LAST_WORDS = 8.0  #: seconds that a dead engine's own supervisor may take to record why


class EngineLost(PeerError):
    """An engine has died."""


class EngineBroadcast:
    """The engines of one attempt."""

    def __init__(self, rundir: RunDir, engines: Sequence[Engine], seconds: float) -> None:
        self.rundir = rundir
        self.engines = tuple(engines)
        self.seconds = seconds

    def post(self, phase: str, path: str, body: Any = None, seconds: float | None = None) -> list[Any]:
        """POST the same body to all engines; their answers in order of the engines."""
        return self.post_all(phase, path, [body] * len(self.engines), seconds).results()

    def call(self, phase: str, method: str, *args: str, seconds: float | None = None) -> list[list[Any]]:
        """Call a method of all workers of all engines; [engine][worker] -> what it returned."""
        answers = self.post(phase, "/collective_rpc", {"method": method, "args": list(args)}, seconds)
        return [answer["results"] for answer in answers]

    def name_dead(self, phase: str, seconds: float) -> None:
        """Raise EngineLost if an engine is seen to be dead within `seconds`: a server takes a moment to know that its
        core is."""
        deadline = Deadline(seconds)
        while not deadline.over:
            for engine in self.engines:
                self.check_alive(engine, phase)
            time.sleep(0.2)

    def check_alive(self, engine: Engine, phase: str) -> None:
        """Raise EngineLost if an engine answers that it is not well, or nothing listens there."""
        found = status(engine.address, seconds=GLANCE_SECONDS)
        if found not in (200, SILENT):  # slow is not dead
            answer = f"{HEALTH} answers {found}" if found > 0 else "there is no listener"
            self.raise_lost(engine, phase, f"{engine} died during {phase}: {answer}")

    def raise_lost(self, engine: Engine, phase: str, message: str) -> NoReturn:
        """Raise EngineLost, with the reason that the engine's own supervisor records, if it does so in time."""
        until = Deadline(LAST_WORDS)
        while not until.over:
            self.listen(phase)
            if end := end_of(self.rundir, engine.index, engine.incarnation):
                raise EngineLost(f"{end.why} (noticed during {phase})")
            time.sleep(0.1)
        raise EngineLost(message)

    def listen(self, phase: str) -> None:
        """Raise if some role of the run has recorded its failure."""
        if found := self.rundir.failure():
            raise PeerError(f"{found} (noticed during {phase})")

    def post_all(self, phase: str, path: str, bodies: Sequence[Any], seconds: float | None = None) -> PendingCalls:
        """Start one POST to each engine, bodies in order of the engines, and return at once."""
        return PendingCalls(self, phase, path, bodies, seconds or self.seconds)


def fleet_of(rundir: RunDir, plan: Plan, seconds: float, patience: float) -> EngineBroadcast:
    """All engines of the plan.

    Args:
        seconds: limit of a call.
        patience: seconds that they are waited for at most.

    Raises:
        DeadlineError, PeerError: name the engine that does not come up.
    """
    peers = [wait_for(rundir, EnginePeer, index, patience) for index in range(len(plan.engines))]
    keys = [http_key(rundir, index, peer.incarnation) for index, peer in enumerate(peers)]
    engines = [Engine.at(Address(peer.host, peer.port, keys[i]), i) for i, peer in enumerate(peers)]
    return EngineBroadcast(rundir, engines, seconds)


class PendingCalls:
    """Calls under way, one to each engine."""

    def __init__(self, fleet: EngineBroadcast, phase: str, path: str, bodies: Sequence[Any], seconds: float) -> None:
        self.fleet = fleet
        self.phase = phase
        self.limit = seconds
        self.end = Deadline(seconds)
        self.next_glance = time.monotonic() + GLANCE
        self.futures = [_start(e.address, path, body, seconds) for e, body in zip(fleet.engines, bodies, strict=True)]

    def results(self) -> list[Any]:
        """All answers.

        Raises:
            PeerError, DeadlineError: names the first engine that failed or is late.
        """
        while wait(self.futures, timeout=GLANCE / 2).not_done:
            self.check()
        self.check()
        return [future.result() for future in self.futures]

    def check(self) -> None:
        """Raise if an engine has answered with an error, died, or is late; cheap enough to be called in a loop."""
        for engine, future in zip(self.fleet.engines, self.futures, strict=True):
            if future.done() and (error := future.exception()) is not None:
                self._raise(engine, error)
        now = time.monotonic()
        late = [e for e, future in zip(self.fleet.engines, self.futures, strict=True) if not future.done()]
        if late and self.end.over:
            raise self._late(late[0])
        if late and now > self.next_glance:
            self.next_glance = now + GLANCE
            self.fleet.listen(self.phase)
            for engine in late:
                self.fleet.check_alive(engine, self.phase)

    def _raise(self, engine: Engine, error: BaseException) -> None:
        if isinstance(error, HttpError) and error.status is None:
            if isinstance(error.__cause__, TimeoutError):
                raise self._late(engine) from error
            self.fleet.raise_lost(engine, self.phase, f"{engine} died during {self.phase}: {error}")
        if isinstance(error, HttpError) and (error.status or 0) >= 500:
            self.fleet.check_alive(engine, self.phase)  # what fails there may have failed because its core is dead
        raise PeerError(f"{engine}: {self.phase} failed: {error}") from error

    def _late(self, engine: Engine) -> DeadlineError:
        what = f"{engine}: {self.phase} did not end within {self.limit:.0f} s"
        return DeadlineError(what, "see its log, or raise --update-timeout")


def _start(address: Address, path: str, body: Any, seconds: float) -> Future[Any]:
    return in_thread(lambda: request_json(address, "POST", path, seconds, body))


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Run `work` in a thread that does not keep the process alive."""
    future: Future[Any] = Future()

    def target() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  (handed to the waiting thread)
            future.set_exception(error)

    threading.Thread(target=target, daemon=True).start()
    return future
