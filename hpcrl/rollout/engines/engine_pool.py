"""The engines, seen from the rollout process: a pool of HTTP servers that answer generation requests.

Invariants: a request goes to the living engine with the fewest requests in flight, and no engine ever has more than
--rollout-server-concurrency; a request whose engine dies is asked again elsewhere, a bounded number of times (a request
is a pure function of its body, so asking twice is safe); every wait has a deadline that names the engine and its host.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from hpcrl.config.options import Options
from hpcrl.errors import DeadlineError, PeerError
from hpcrl.plan import Plan
from hpcrl.queue.auth import http_key
from hpcrl.run.peers import IDLE, EnginePeer, find
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir

ATTEMPTS = 4  #: how often one request is sent at most
PAUSE = 0.05  #: seconds, times 4 for every attempt, before a request is sent again
PROBE = 5.0  #: seconds that an engine has to say that it lives
CONNECT = 10.0  #: seconds for a TCP connection


@dataclass
class PooledEngine:
    """One engine: where it is, how busy, and, once it is gone, why."""

    index: int
    host: str
    url: str
    session: aiohttp.ClientSession
    log: str
    model_len: int | None = None
    in_flight: int = 0
    death: str | None = None
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __str__(self) -> str:
        return f"engine-{self.index} on {self.host}"

    async def alive(self) -> bool:
        """Whether it answers /health with 200, on a connection of its own: those that are kept may have been closed meanwhile."""
        timeout = aiohttp.ClientTimeout(total=PROBE)
        try:
            async with (
                aiohttp.ClientSession(headers=self.session.headers, timeout=timeout) as session,
                session.get(f"{self.url}/health") as answer,
            ):
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


class EnginePool:
    """All engines of the run."""

    def __init__(self, rundir: RunDir, plan: Plan, options: Options) -> None:
        self._rundir, self._plan = rundir, plan
        self._patience, self._deadline = options.engine_start_timeout, options.request_timeout
        self._limit = options.rollout_server_concurrency
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.engines: list[PooledEngine] = []

    async def close(self) -> None:
        """Drop every connection; the engines drop what was asked for on them."""
        for engine in self.engines:
            await engine.session.close()

    async def connect(self) -> None:
        """Wait until every engine of the plan has published where it is.

        DeadlineError names the first that has not; PeerError as soon as the attempt has failed elsewhere.
        """
        if self.engines or not self._plan.engines:
            return
        deadline, found = time.monotonic() + self._patience, []
        for index, place in enumerate(self._plan.engines):
            while (peer := find(self._rundir, EnginePeer, index)) is None:
                self._rundir.check()
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"engine-{index} on {place.host} did not come up within --engine-start-timeout {self._patience:.0f} s",
                        f"see {self._log(index)}",
                    )
                await asyncio.sleep(0.1)
            found.append(peer)
        key = http_key(self._rundir)
        self.engines = [self._engine(index, peer, key) for index, peer in enumerate(found)]

    def _engine(self, index: int, peer: EnginePeer, key: str) -> PooledEngine:
        """One engine, with a session of its own."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT)
        headers = {"Authorization": f"Bearer {key}"}
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE)
        session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)
        url = f"http://{_bracket(peer.host)}:{peer.port}"
        return PooledEngine(index, self._plan.engines[index].host, url, session, self._log(index), peer.model_len)

    def _log(self, index: int) -> str:
        return str(self._rundir.logs / f"engine-{index}.log")

    @property
    def model_len(self) -> int | None:
        """Tokens of prompt and response together that every engine can hold; None if none has said."""
        return min((e.model_len for e in self.engines if e.model_len), default=None)

    def __str__(self) -> str:
        """Who is alive and how busy, for a message."""
        return ", ".join(f"{e}: {e.death or f'{e.in_flight} requests in flight'}" for e in self.engines)

    # ---- requests

    async def post(self, path: str, body: dict[str, Any]) -> tuple[PooledEngine, bytes]:
        """Send `body` as JSON to some engine; (engine, its answer).

        PeerError if no engine is left, or one refuses the request; DeadlineError if one takes longer than
        --request-timeout.
        """
        data, engine, trouble = msgspec.json.encode(body), None, ""
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE * 4**attempt)  # a server that has just answered 500 closes its connections first
            engine = await self._take()
            try:
                status, answer = await self._send(engine, path, data)
                if status == 200:
                    return engine, answer
                trouble = f"HTTP {status}: {answer[:300].decode(errors='replace')}"
                if status < 500:
                    raise PeerError(f"{engine} refused {path}: {trouble}", f"see {engine.log}")
                await self._examine(engine, trouble)  # before it is given back: nobody else should run into it meanwhile
            except aiohttp.ClientError as error:
                trouble = f"{type(error).__name__}: {error}"
                await self._examine(engine, trouble)
            finally:
                self._give_back(engine)
        raise PeerError(f"{engine} failed a request {ATTEMPTS} times, last with {trouble}", f"see {engine.log}")

    async def _send(self, engine: PooledEngine, path: str, data: bytes) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(self._deadline),
                engine.session.post(f"{engine.url}{path}", data=data, headers=headers) as answer,
            ):
                return answer.status, await answer.read()
        except TimeoutError as error:
            if isinstance(error, aiohttp.ClientError):  # no connection within CONNECT
                raise
            raise DeadlineError(
                f"{engine} did not answer {path} within --request-timeout {self._deadline:g} s", f"see {engine.log}"
            ) from error

    async def _examine(self, engine: PooledEngine, trouble: str) -> None:
        """After a failed request: find out whether the engine is gone, and say so once."""
        async with engine.probing:
            if engine.death is not None or await engine.alive():
                return
            engine.death = f"died ({trouble})"
        say(f"{engine} {engine.death}")
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    # ---- who is next

    async def _take(self) -> PooledEngine:
        """The least loaded living engine with room, waited for.  PeerError if none is alive."""
        while True:
            alive = [e for e in self.engines if e.death is None]
            if not alive:
                last = self.engines[-1]
                raise PeerError(f"no engine is left: {', '.join(f'{e} {e.death}' for e in self.engines)}", f"see {last.log}")
            if free := [e for e in alive if e.in_flight < self._limit]:
                engine = min(free, key=lambda e: (e.in_flight, e.index))
                engine.in_flight += 1
                return engine
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._wake()  # the turn that we were given goes to the next
                raise

    def _give_back(self, engine: PooledEngine) -> None:
        engine.in_flight -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
