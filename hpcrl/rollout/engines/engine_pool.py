"""The engines, seen from the rollout process: HTTP servers that answer generation requests.

Invariants: no engine ever has more than --rollout-server-concurrency samples in flight, and none but those that the
registry calls serving get any; what it costs to find an engine does not grow with their number; every wait has a
deadline that names the engine and its host.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from hpcrl.config.options import Options
from hpcrl.engine.membership.http import GLANCE_SECONDS, Address, answer
from hpcrl.engine.membership.load import Loads
from hpcrl.engine.membership.registry import Registry
from hpcrl.errors import DeadlineError, PeerError
from hpcrl.plan import Plan
from hpcrl.report.timeline.spans import GENERATE, NOWHERE, Timeline
from hpcrl.run.engine_files import EngineReports
from hpcrl.run.peers import IDLE, EnginePeer
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir
from hpcrl.transport.auth import http_key
from hpcrl.utils.deadline import Deadline
from hpcrl.weights.colocation import TRAINERS_TURN, Event, HandOver, OutOfTurn

CONNECT = 10.0  #: seconds for a TCP connection
DRAIN = 10.0  #: seconds that requests which were ended with their rollout may take before the engines sleep
HOMES = 65536  #: keys whose engine is remembered
#: a key stays where it is until its engine has so many more in flight than the least loaded
SLACK = 10
RATIO = 1.2
WHOLE = 8  #: so many samples of a group are never cut into parts: an engine computes them nearly as fast as one
PARTS = 8  #: an engine without room for all of a group is given a part of it if it has this share of its limit free


@dataclass(eq=False)
class PooledEngine:
    """One engine in one of its incarnations: where it is, and how busy.

    Attributes:
        number: ours alone.
    """

    index: int
    host: str
    address: Address
    session: aiohttp.ClientSession
    log: str
    loads: Loads
    model_len: int | None = None
    incarnation: int = 0
    number: int = 0
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _urls: dict[str, URL] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        """Samples that it was asked for and has not answered."""
        return self.loads[self.number]

    def at(self, path: str) -> URL:
        """The address of one of its routes, taken apart once."""
        if path not in self._urls:
            self._urls[path] = URL(f"{self.address.url}{path}")
        return self._urls[path]

    def __str__(self) -> str:
        return f"engine-{self.index} on {self.host}"


class EnginePool:
    """All engines of the run, and which of them is asked next.

    A group goes whole to the least loaded engine, where its prompt is computed once, as long as it is no more than an
    engine's fair share of what is in flight and waiting, or than WHOLE; else it is cut into parts of that size.  So
    engines differ by one group at most.  What brings an affinity key (a conversation, whose earlier turns lie in one
    engine's prefix cache) goes where that key went before, until that engine has both SLACK and RATIO more in flight
    than the least loaded, is full, or dies; then the key moves.
    """

    def __init__(
        self,
        rundir: RunDir,
        plan: Plan,
        options: Options,
        timeline: Timeline = NOWHERE,
        registry: Registry | None = None,
    ) -> None:
        """Create one.

        Args:
            registry: the run's; without one, an engine serves as soon as it is up.
        """
        self._rundir = rundir
        self._plan = plan
        self._patience = options.engine_start_timeout
        self.request_timeout = options.request_timeout
        self._limit = options.rollout_server_concurrency
        self._indexes: dict[int, int] = {}  # of every engine that ever served, by its number

        def busy(number: int, begin: int, end: int) -> None:
            timeline.add(GENERATE, begin, end, engine=self._indexes[number])

        self.loads = Loads(self._limit, timeline.now, busy)
        self._homes: OrderedDict[str, PooledEngine] = OrderedDict()
        self._connecting = asyncio.Lock()
        self._reports = EngineReports(rundir)
        self._clients: list[aiohttp.ClientSession] = []  # one for each incarnation of an engine
        self._count = 0
        self.registry = Registry(options.engine_restarts, trusting=True) if registry is None else registry
        for index, place in enumerate(plan.engines):
            self.registry.expect(index, place.host)
        for number, address in enumerate(plan.external):
            self.registry.expect(len(plan.engines) + number, address)
        self.changed: Callable[[], None] = lambda: None  #: called when requests that wait may have a place to go
        self.engines: list[PooledEngine] = []  #: those that are given requests
        self._by_number: dict[int, PooledEngine] = {}
        self._parting: list[PooledEngine] = []  # those that are given none any more, and may still have some
        #: tokens of prompt and response together that every engine can hold; None if none has said
        self.model_len: int | None = None
        #: with --colocate, whose turn it is; the trainer calls us first during its own
        self.turns = HandOver("the rollout process", TRAINERS_TURN) if options.takes_turns else None

    async def close(self) -> None:
        """Drop every connection; the engines drop what was asked for on them."""
        for client in self._clients:
            await client.close()

    async def connect(self) -> None:
        """Wait until every engine of the plan has come up once, and one serves.

        Raises:
            DeadlineError: names the first that has not.
            PeerError: as soon as the attempt has failed elsewhere.
        """
        async with self._connecting:
            if self._count or not self._plan.engine_count:
                return
            deadline = Deadline(self._patience)
            while self.poll_engines() or self.registry.starting() or not self.engines:
                self._rundir.check()
                if deadline.over:
                    late = next(iter(self.registry.starting() or self.registry.members.values()))
                    why = "come up" if late.state == "starting" else "get the policy's weights"
                    raise DeadlineError(
                        f"{late} did not {why} within --engine-start-timeout {self._patience:.0f} s",
                        f"see {self._log(late.index)}",
                    )
                await asyncio.sleep(0.1)

    # ---- who there is

    def poll_engines(self) -> bool:
        """Take in what the engines' supervisors have said since; whether that was anything."""
        new = self._reports.new()
        for index, said in new:
            if index not in self.registry.members:
                continue
            if isinstance(said, EnginePeer):
                key = http_key(self._rundir, index, said.incarnation)
                address = Address(said.host, said.port, key)
                self.registry.up(index, said.incarnation, address, said.model_len)
            else:
                self.registry.ended(index, said.incarnation, said.why, said.again)
                say(f"{self.registry.members[index]}: {said.why}")
        if new:
            self.refresh()
        return bool(new)

    def refresh(self) -> None:
        """Do as the registry has it now: who serves gets requests, who does not gets none."""
        serving = {(m.index, m.incarnation) for m in self.registry.serving()}
        for engine in [e for e in self.engines if (e.index, e.incarnation) not in serving]:
            self.engines.remove(engine)
            self._by_number.pop(engine.number)
            self.loads.drop(engine.number)
            self._parting.append(engine)
        self._parting = [e for e in self._parting if e.in_flight]
        there = {(e.index, e.incarnation) for e in self.engines}
        for index, _ in sorted(serving - there):
            self._welcome(self.engine(index))
        self.engines.sort(key=lambda e: e.index)
        self.model_len = min((e.model_len for e in self.engines if e.model_len), default=self.model_len)
        self.changed()

    def requests(self, index: int) -> int:
        """How many requests this engine has in flight, those of an earlier incarnation of it included."""
        return sum(e.in_flight for e in (*self.engines, *self._parting) if e.index == index)

    def _welcome(self, engine: PooledEngine) -> None:
        self.engines.append(engine)
        self._by_number[engine.number] = engine
        self._indexes[engine.number] = engine.index
        self.loads.add(engine.number)

    def engine(self, index: int) -> PooledEngine:
        """An engine as it is reached in its last incarnation."""
        member = self.registry.members[index]
        assert member.address is not None
        self._count = self._count + 1
        self._clients.append(_session(member.address))
        return PooledEngine(
            index,
            member.host,
            member.address,
            self._clients[-1],
            self._log(index),
            self.loads,
            member.model_len,
            member.incarnation,
            self._count,
        )

    def _log(self, index: int) -> str:
        if len(self._plan.engines) <= index < self._plan.engine_count:
            return "what its hpcrl engines serve says"
        return str(self._rundir.logs / f"engine-{index}.log")

    async def turn(self, event: Event) -> None:
        """The trainer says what happens on the GPUs that it shares with the engines.  OutOfTurn if requests are under
        way."""
        if self.turns is None:
            raise OutOfTurn(f"{event}: trainer and engines share no GPUs")
        deadline = Deadline(DRAIN)
        while event == Event.SLEEP and self.turns.at.requests and not deadline.over:
            await asyncio.sleep(0.01)
        self.turns.tell(event)

    def __str__(self) -> str:
        """Who is alive and how busy, for a message."""
        busy = {e.index: f"{e.in_flight} requests in flight" for e in self.engines}
        return ", ".join(
            f"{m}: {busy.get(m.index) or m.state} {m.why}".rstrip() for m in self.registry.members.values()
        )

    # ---- who is next

    def assign_engine(self, count: int, waiting: int, affinity: str | None = None) -> tuple[PooledEngine, int] | None:
        """An engine and how many of `count` samples of one group it has been given; None while all are full, or none
        serves.

        Args:
            waiting: samples that wait for an engine, these included.

        Raises:
            PeerError: if none will ever serve, or it is the trainer's turn.
        """
        if self.turns is not None and not self.turns.answers:
            raise OutOfTurn(f"a request out of turn: {self.turns.at}", "ask while a rollout or an evaluation is made")
        if not self.loads:
            if why := self.registry.hopeless():
                raise PeerError(why, f"see {self._log(max(self.registry.members, default=0))}")
            return None
        share = -(-(self.loads.total + waiting) // len(self.loads))
        wanted = min(count, max(share, WHOLE), self._limit)
        engine = self._home(affinity, wanted) or self._by_number[self.loads.least()]
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
        if affinity is None or (engine := self._homes.get(affinity)) is None or engine.number not in self.loads:
            return None
        self._homes.move_to_end(affinity)
        least = self.loads[self.loads.least()]
        busy = engine.in_flight > least + SLACK and engine.in_flight > RATIO * least
        return None if busy or engine.in_flight + wanted > self._limit else engine

    def give_back(self, engine: PooledEngine, count: int = 1) -> None:
        """`count` samples are in flight there no more."""
        self._move(engine, -count)

    def _move(self, engine: PooledEngine, by: int) -> None:
        if self.turns is not None:
            self.turns.tell(Event.SEND if by > 0 else Event.ANSWER, abs(by))
        self.loads.move(engine.number, by)

    async def examine(self, engine: PooledEngine, trouble: str) -> None:
        """After a failed request: find out whether the engine is gone, and say so once."""
        async with engine.probing:
            if engine.number not in self.loads or (await answer(engine.address, seconds=GLANCE_SECONDS))[0] == 200:
                return
            self.registry.suspect(engine.index, engine.incarnation, f"died ({trouble})")
            self.refresh()
        say(f"{engine} died ({trouble})")


def _session(address: Address) -> aiohttp.ClientSession:
    """Connections to an engine, as many as are needed, kept open for IDLE seconds; only they know its key."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
        headers={"Authorization": f"Bearer {address.key}"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )
