"""The engines, seen from the rollout process: HTTP servers that answer generation requests.

Invariants: no engine ever has more than --rollout-server-concurrency samples in flight, and none but living ones get any;
what it costs to find an engine does not grow with their number; every wait has a deadline that names the engine and its host.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from hpcrl.config.options import Options
from hpcrl.errors import DeadlineError, PeerError
from hpcrl.handover import TRAINERS_TURN, Event, HandOver, OutOfTurn
from hpcrl.plan import Plan
from hpcrl.queue.auth import http_key
from hpcrl.report.timeline.names import GENERATE
from hpcrl.report.timeline.spans import NOWHERE, Timeline
from hpcrl.rollout.engines.loads import Loads
from hpcrl.rollout.engines.occupancy import Occupancy
from hpcrl.run.peers import IDLE, EnginePeer, find
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir

PROBE = 5.0  #: seconds that an engine has to say that it lives
CONNECT = 10.0  #: seconds for a TCP connection
DRAIN = 10.0  #: seconds that requests which were ended with their rollout may take before the engines sleep
HOMES = 65536  #: keys whose engine is remembered
SLACK, RATIO = 10, 1.2  #: a key stays where it is until its engine has so many more in flight than the least loaded
WHOLE = 8  #: so many samples of a group are never cut into parts: an engine computes them nearly as fast as one
PARTS = 8  #: an engine without room for all of a group is given a part of it if it has this share of its limit free


@dataclass(eq=False)
class PooledEngine:
    """One engine: where it is, how busy, and, once it is gone, why.  lean: whether it has our own route."""

    index: int
    host: str
    url: str
    session: aiohttp.ClientSession
    log: str
    model_len: int | None = None
    lean: bool = False
    in_flight: int = 0
    death: str | None = None
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _urls: dict[str, URL] = field(default_factory=dict)

    def at(self, path: str) -> URL:
        """The address of one of its routes, taken apart once."""
        if path not in self._urls:
            self._urls[path] = URL(f"{self.url}{path}")
        return self._urls[path]

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
    """All engines of the run, and which of them is asked next.

    A group goes whole to the least loaded engine, where its prompt is computed once, as long as it is no more than an engine's
    fair share of what is in flight and waiting, or than WHOLE; else it is cut into parts of that size.  So engines differ by one
    group at most.  What brings an affinity key (a conversation, whose earlier turns lie in one engine's prefix cache) goes where that key
    went before, until that engine has both SLACK and RATIO more in flight than the least loaded, is full, or dies; then the key
    moves.
    """

    def __init__(self, rundir: RunDir, plan: Plan, options: Options, timeline: Timeline = NOWHERE) -> None:
        self._rundir, self._plan = rundir, plan
        self._patience, self.request_timeout = options.engine_start_timeout, options.request_timeout
        self._limit = options.rollout_server_concurrency
        self.occupancy = Occupancy(self._limit, timeline.now, lambda n, begin, end: timeline.add(GENERATE, begin, end, engine=n))
        self._loads = Loads(self.occupancy)
        self._homes: OrderedDict[str, PooledEngine] = OrderedDict()
        self._connecting = asyncio.Lock()
        self.engines: list[PooledEngine] = []
        #: tokens of prompt and response together that every engine can hold; None if none has said
        self.model_len: int | None = None
        #: with --colocate, whose turn it is; the trainer calls us first during its own
        self.turns = HandOver("the rollout process", TRAINERS_TURN) if options.takes_turns else None

    async def close(self) -> None:
        """Drop every connection; the engines drop what was asked for on them."""
        if self.engines:
            await self.engines[0].session.close()  # it is that of all

    async def connect(self) -> None:
        """Wait until every engine of the plan has published where it is.

        DeadlineError names the first that has not; PeerError as soon as the attempt has failed elsewhere.
        """
        async with self._connecting:
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
            session = self._session()
            self.engines = [self._engine(index, peer, session) for index, peer in enumerate(found)]
            self.model_len = min((e.model_len for e in self.engines if e.model_len), default=None)
            for engine in self.engines:
                self._loads.add(engine.index)

    def _session(self) -> aiohttp.ClientSession:
        """Connections to all engines, as many as are needed, kept open for IDLE seconds."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
            headers={"Authorization": f"Bearer {http_key(self._rundir)}"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def _engine(self, index: int, peer: EnginePeer, session: aiohttp.ClientSession) -> PooledEngine:
        url = f"http://{_bracket(peer.host)}:{peer.port}"
        return PooledEngine(index, self._plan.engines[index].host, url, session, self._log(index), peer.model_len, peer.lean)

    def _log(self, index: int) -> str:
        return str(self._rundir.logs / f"engine-{index}.log")

    async def turn(self, event: Event) -> None:
        """The trainer says what happens on the GPUs that it shares with the engines.  OutOfTurn if requests are under way."""
        if self.turns is None:
            raise OutOfTurn(f"{event}: trainer and engines share no GPUs")
        deadline = time.monotonic() + DRAIN
        while event == Event.SLEEP and self.turns.at.requests and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self.turns.tell(event)

    def __str__(self) -> str:
        """Who is alive and how busy, for a message."""
        return ", ".join(f"{e}: {e.death or f'{e.in_flight} requests in flight'}" for e in self.engines)

    # ---- who is next

    def take(self, count: int, waiting: int, affinity: str | None = None) -> tuple[PooledEngine, int] | None:
        """An engine and how many of `count` samples of one group it has been given; None while all are full.

        waiting: samples that wait for an engine, these included.  PeerError if none is alive, or it is the trainer's turn.
        """
        if self.turns is not None and not self.turns.answers:
            raise OutOfTurn(f"a request out of turn: {self.turns.at}", "ask while a rollout or an evaluation is made")
        if not self._loads:
            if not self.engines:
                raise PeerError("no engine has been connected to")
            dead = ", ".join(f"{e} {e.death}" for e in self.engines)
            raise PeerError(f"no engine is left: {dead}", f"see {self.engines[-1].log}")
        share = -(-(self._loads.total + waiting) // len(self._loads))
        wanted = min(count, max(share, WHOLE), self._limit)
        engine = self._home(affinity, wanted) or self.engines[self._loads.least()]
        room = self._limit - engine.in_flight
        if room < min(wanted, max(1, self._limit // PARTS)):
            return None
        if affinity is not None:
            self._homes[affinity] = engine
            if len(self._homes) > HOMES:
                self._homes.popitem(last=False)
        given = min(wanted, room)
        self._move(engine, given)
        return engine, given

    def _home(self, affinity: str | None, wanted: int) -> PooledEngine | None:
        """The engine of `affinity`, if it is alive, has room, and is not much busier than the least loaded."""
        if affinity is None or (engine := self._homes.get(affinity)) is None or engine.death is not None:
            return None
        self._homes.move_to_end(affinity)
        least = self._loads[self._loads.least()]
        busy = engine.in_flight > least + SLACK and engine.in_flight > RATIO * least
        return None if busy or engine.in_flight + wanted > self._limit else engine

    def give_back(self, engine: PooledEngine, count: int = 1) -> None:
        """`count` samples are in flight there no more."""
        self._move(engine, -count)

    def _move(self, engine: PooledEngine, by: int) -> None:
        engine.in_flight += by
        if self.turns is not None:
            self.turns.tell(Event.SEND if by > 0 else Event.ANSWER, abs(by))
        self._loads.move(engine.index, by)

    async def examine(self, engine: PooledEngine, trouble: str) -> None:
        """After a failed request: find out whether the engine is gone, and say so once."""
        async with engine.probing:
            if engine.death is not None or await engine.alive():
                return
            engine.death = f"died ({trouble})"
            self._loads.drop(engine.index)
        say(f"{engine} {engine.death}")


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
