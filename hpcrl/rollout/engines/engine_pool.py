"""The engines, seen from the rollout process: HTTP servers that answer generation requests.

Invariants: no engine ever has more than --rollout-server-concurrency samples in flight, and none but those that the
registry calls serving get any; every wait has a deadline that names the engine and its host.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from hpcrl.config.options import Options
from hpcrl.engine.membership.http import GLANCE_SECONDS, Address, answer, client_session
from hpcrl.engine.membership.registry import Registry
from hpcrl.errors import DeadlineError, PeerError
from hpcrl.plan import Plan
from hpcrl.report.timeline.spans import GENERATE, NOWHERE, Timeline
from hpcrl.rollout.engines.load import Loads
from hpcrl.run.engine_files import EngineReports
from hpcrl.run.peers import IDLE, EnginePeer
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir
from hpcrl.transport.auth import http_key
from hpcrl.utils.waiting import Deadline
from hpcrl.weights.colocation import TRAINERS_TURN, Event, HandOver, OutOfTurn

_OCTETS = {"Content-Type": "application/octet-stream"}
METRICS = aiohttp.ClientTimeout(total=5.0)  #: for an engine's /metrics
DRAIN = 10.0  #: seconds that requests which were ended with their rollout may take before the engines sleep
HOMES = 65536  #: keys whose engine is remembered
#: a key stays where it is until its engine has so many more in flight than the least loaded, and times as many
SLACK = 8
RATIO = 1.2


@dataclass(eq=False)
class PooledEngine:
    """One engine in one of its incarnations: where it is, and how busy.

    Attributes:
        head: headers of a request to it, with its key.
        number: ours alone.
        in_flight: samples that it was asked for and has not answered.
    """

    index: int
    host: str
    address: Address
    log: str
    model_len: int | None = None
    incarnation: int = 0
    number: int = 0
    head: dict[str, str] = field(default_factory=dict, repr=False)
    in_flight: int = 0
    probing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _urls: dict[str, URL] = field(default_factory=dict)

    def at(self, path: str) -> URL:
        """The address of one of its routes, taken apart once."""
        if path not in self._urls:
            self._urls[path] = URL(f"{self.address.url}{path}")
        return self._urls[path]

    def __str__(self) -> str:
        return f"engine-{self.index} on {self.host}"


@dataclass(eq=False, kw_only=True)
class PendingCall:
    """What waits for an engine, or is in flight at one.

    Attributes:
        affinity: calls that share it go to one engine.
        engine: that has it in flight.
        ended: an abort was requested.
        waiting: for an engine, to which an abort puts an end.
    """

    affinity: Hashable
    engine: PooledEngine | None = None
    ended: bool = False
    waiting: asyncio.Future[PooledEngine | None] | None = None


class EnginePool:
    """All engines of the run, and which of them is asked next.

    What shares an affinity key (a group, whose prompt lies in one engine's prefix cache, or a conversation with its
    earlier turns) goes where that key went before, until that engine has both SLACK and RATIO more in flight than the
    least loaded, is full, or dies; then the key moves to the least loaded.
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
        self._homes: OrderedDict[Hashable, PooledEngine] = OrderedDict()
        self._waiting: deque[PendingCall] = deque()
        self._connecting = asyncio.Lock()
        self._reports = EngineReports(rundir)
        self._session: aiohttp.ClientSession | None = None
        self._count = 0
        self.registry = Registry(options.engine_restarts, trusting=True) if registry is None else registry
        for index, place in enumerate(plan.engines):
            self.registry.expect(index, place.host)
        for number, address in enumerate(plan.external):
            self.registry.expect(len(plan.engines) + number, address)
        self.engines: list[PooledEngine] = []  #: those that are given requests
        self._by_number: dict[int, PooledEngine] = {}
        self._parting: list[PooledEngine] = []  # those that are given none any more, and may still have some
        #: tokens of prompt and response together that every engine can hold; None if none has said
        self.model_len: int | None = None
        #: with --colocate, whose turn it is; the trainer calls us first during its own
        self.turns = HandOver("the rollout process", TRAINERS_TURN) if options.takes_turns else None

    async def close(self) -> None:
        """Drop every connection; the engines drop what was asked for on them."""
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """Connections to the engines, as many as are needed, kept open for IDLE seconds."""
        if self._session is None:
            self._session = client_session(idle=IDLE)
        return self._session

    async def metrics_texts(self) -> dict[int, str]:
        """What each engine says of itself, Prometheus' text, by its number; an engine that does not answer in time is
        left out: others find out what is wrong there."""

        async def ask(engine: PooledEngine) -> str | None:
            try:
                async with self.session.get(engine.at("/metrics"), headers=engine.head, timeout=METRICS) as answer:
                    return await answer.text() if answer.status == 200 else None
            except (aiohttp.ClientError, OSError, TimeoutError):
                return None

        engines = list(self.engines)
        texts = await asyncio.gather(*map(ask, engines))
        return {engine.number: text for engine, text in zip(engines, texts, strict=True) if text is not None}

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
        """Follow the registry: engines that serve get requests, the others get none."""
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
        self._serve_waiting()

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
        return PooledEngine(
            index,
            member.host,
            member.address,
            self._log(index),
            member.model_len,
            member.incarnation,
            self._count,
            _OCTETS | {"Authorization": f"Bearer {member.address.key}"},
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

    # ---- which engine is next

    async def take(self, call: PendingCall) -> PooledEngine | None:
        """An engine that has room for a sample, which is in flight there until `give_back`; None if the call is ended
        before there is one.  Who asks first is served first.

        Raises:
            PeerError: if none will ever serve, or it is the trainer's turn.
        """
        if call.ended:
            return None
        if not self._waiting and (engine := self.assign_engine(call.affinity)) is not None:
            return engine
        found = call.waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(call)
        self._serve_waiting()
        try:
            return await found
        except asyncio.CancelledError:  # it may have come just behind an engine
            if not found.cancelled() and found.exception() is None and (engine := found.result()) is not None:
                self.give_back(engine)
            raise

    def _serve_waiting(self) -> None:
        """Give those that wait, in order, to engines that have room."""
        while self._waiting:
            call = self._waiting[0]
            assert call.waiting is not None
            if not call.waiting.done():
                try:
                    if (engine := self.assign_engine(call.affinity)) is None:
                        return
                    call.waiting.set_result(engine)
                except PeerError as error:  # no engine will ever serve: no other need wait for one
                    call.waiting.set_exception(error)
            self._waiting.popleft()

    def assign_engine(self, affinity: Hashable) -> PooledEngine | None:
        """The engine for a sample, which is counted there from now on; None while all are full, or none serves.

        Raises:
            PeerError: as `take`.
        """
        if self.turns is not None and not self.turns.answers:
            raise OutOfTurn(f"a request out of turn: {self.turns.at}", "ask while a rollout or an evaluation is made")
        if not self.loads:
            if why := self.registry.hopeless():
                raise PeerError(why, f"see {self._log(max(self.registry.members, default=0))}")
            return None
        first = self._by_number[self.loads.least()]
        least = first.in_flight
        if least >= self._limit:
            return None
        engine = self._homes.get(affinity, first)
        busy = engine.in_flight >= max(least + SLACK, RATIO * least)
        if busy or engine.number not in self.loads or engine.in_flight >= self._limit:
            engine = first
        self._homes[affinity] = engine
        self._homes.move_to_end(affinity)
        if len(self._homes) > HOMES:
            self._homes.popitem(last=False)
        self._move(engine, 1)
        return engine

    def give_back(self, engine: PooledEngine) -> None:
        """A sample is in flight there no more."""
        self._move(engine, -1)
        self._serve_waiting()

    def _move(self, engine: PooledEngine, by: int) -> None:
        if self.turns is not None:
            self.turns.tell(Event.SEND if by > 0 else Event.ANSWER, abs(by))
        engine.in_flight += by
        self.loads.move(engine.number, by)

    async def examine(self, engine: PooledEngine, trouble: str) -> None:
        """After a failed request: find out whether the engine is gone, and say so once."""
        async with engine.probing:
            if engine.number not in self.loads or (await answer(engine.address, seconds=GLANCE_SECONDS))[0] == 200:
                return
            self.registry.suspect(engine.index, engine.incarnation, f"died ({trouble})")
            self.refresh()
        say(f"{engine} died ({trouble})")
