"""The rollout queue's server: lives in the rollout process, gives each data-parallel rank its shares, answers calls.

    ROUTER, CURVE with a ZAP allow-list, bound to the rollout's host on a port that the system chose

Invariants: a rank is known by its key and gets its own shares only; a share is kept until its rank has asked for a
later one, and is the same bytes however often it is asked for; a call runs its handler once, however often it arrives,
and its answer is kept until its client makes another; nothing that a peer sends ends the server.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from hpcrl.errors import HpcrlError, PeerError
from hpcrl.plan import Plan
from hpcrl.run.peers import RolloutPeer, publish
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir
from hpcrl.transport import auth, messages, sockets
from hpcrl.transport.share_format import Buffer, Share, WireError, encode

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
_PENDING = [messages.pack(messages.Pending())]


@dataclass
class _Answer:
    """The frames of an answer.

    Attributes:
        route: the connection that they were last written to: it delivers them, or it breaks.
    """

    frames: list[Buffer]
    route: bytes = b""


@dataclass
class _Call:
    """The last call of a client, and the connection over which it came last."""

    number: int
    route: bytes
    answer: _Answer | None = None


@dataclass
class Rank:
    """One data-parallel rank, across connections.

    Attributes:
        shares: by rollout id, until the rank has asked for a later one.
        first, last: the rollouts whose shares it asked for last, over the connection `route`.
        calls: the last of each client: one in a run.
    """

    number: int
    shares: dict[int, _Answer] = field(default_factory=dict)
    first: int = 0
    last: int = -1
    route: bytes = b""
    calls: dict[str, _Call] = field(default_factory=dict)

    def refusal(self, hello: messages.Hello, plan: Plan, dp_size: int) -> HpcrlError | None:
        """Why a client that says `hello`, and holds this rank's key, is not of this run; None if it is."""
        here = f"trainer DP rank {self.number} on {hello.host}"
        mine = (plan.run_id, plan.attempt)
        its = (hello.run_id, hello.attempt)
        if hello.protocol != messages.PROTOCOL:
            return WireError(
                f"{here} speaks queue protocol {hello.protocol}, the rollout process {messages.PROTOCOL}",
                "use one version of hpcrl on all hosts",
            )
        if mine != its:
            return PeerError(
                f"{here} belongs to run {its[0]}, attempt {its[1]}; the rollout process to run {mine[0]}, attempt "
                f"{mine[1]}"
            )
        if hello.dp_rank != self.number:
            return PeerError(
                f"{here} says that it is DP rank {hello.dp_rank}, but holds the key of DP rank {self.number}"
            )
        if hello.dp_size != dp_size:
            return PeerError(f"{here} counts {hello.dp_size} DP ranks, the rollout process {dp_size}")
        return None


class QueueServer:
    """The server of one attempt; every method runs in one event loop.

    Attributes:
        handlers: method -> coroutine function from parameters to result, both dicts of what msgpack can carry; each
            call is a task of its own.
    """

    def __init__(self, rundir: RunDir, plan: Plan, dp_size: int, handlers: Mapping[str, Handler]) -> None:
        self._rundir = rundir
        self._plan = plan
        self._handlers = dict(handlers)
        self._ranks = [Rank(number) for number in range(dp_size)]
        self._last_put = -1
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: PeerError | None = None
        self._context: zmq.asyncio.Context | None = None
        self._door: auth.CurveAuthenticator | None = None

    # ---- life

    async def start(self) -> None:
        """Bind, let the clients in, and publish address and public key as peer rollout-0.

        Raises:
            HpcrlError: if that fails.
        """
        host = sockets.bind_address(self._plan)
        sockets.keep_freed_memory()
        self._context = zmq.asyncio.Context(io_threads=min(4, len(self._ranks)))
        self._socket = self._context.socket(zmq.ROUTER)
        sockets.set_limits(self._socket, server=True)
        self._socket.router_mandatory = True  # a send to a peer that is gone is an error, not silence
        keys = auth.server_keys(self._rundir)
        self._door = auth.CurveAuthenticator(self._context, keys, say)
        auth.lock_server(self._socket, keys)
        try:
            self._socket.bind(sockets.endpoint(host, 0))
        except zmq.ZMQError as error:
            raise HpcrlError(
                f"rollout: the queue cannot listen on {host}: {error.strerror}", "is this the host that the plan names?"
            ) from error
        port = int(self._socket.last_endpoint.rsplit(b":", 1)[1])
        self._spawn(self._listen())
        peer = RolloutPeer(
            host=host, port=port, public_key=keys.public, run_id=self._plan.run_id, attempt=self._plan.attempt
        )
        publish(self._rundir, peer)

    async def close(self) -> None:
        """Send what is written, end handlers that still run, let go of the port."""
        if self._context is None:
            return
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._door:
            self._door.stop()
        self._socket.close()
        await asyncio.to_thread(self._context.term)
        self._context = None

    def _rank_of(self, frame: zmq.Frame) -> Rank:
        """The rank that the connection behind `frame` belongs to."""
        return self._ranks[auth.rank_of(frame)]

    # ---- what the rollout process does

    async def put(self, rollout_id: int, shares: Sequence[Share]) -> None:
        """Hand over one share per data-parallel rank; few are kept, as the trainer asks for one rollout at a time.

        Ids must go up. The arrays must not change until the ranks have them.

        Raises:
            PeerError: after `fail`.
        """
        if len(shares) != len(self._ranks) or any(share.rollout_id != rollout_id for share in shares):
            raise ValueError(
                f"rollout {rollout_id}: one share of that rollout for each of {len(self._ranks)} ranks expected"
            )
        if rollout_id <= self._last_put:
            raise ValueError(f"the share of rollout {rollout_id} was put after that of rollout {self._last_put}")
        answers = [_Answer(messages.answer(("share", rollout_id), encode(share))) for share in shares]
        if self._failure:
            raise self._failure
        self._last_put = rollout_id
        for rank, answer in zip(self._ranks, answers, strict=True):
            rank.shares[rollout_id] = answer
            await self._deliver(rank)

    async def fail(self, message: str) -> None:
        """Answer every fetch and call, waiting or to come, with this error."""
        self._failure = self._failure or PeerError(message)
        for rank in self._ranks:
            for call in list(rank.calls.values()):
                await self._finish(call, messages.failed(self._failure, ("call", call.number)))
            await self._send(rank.route, messages.failed(self._failure, ("share", rank.first)))

    # ---- what clients ask

    async def _listen(self) -> None:
        while True:
            route, *frames = await self._socket.recv_multipart(copy=False)
            try:
                await self._receive(route.bytes, frames)
            except Exception:  # noqa: BLE001  (a defect in one answer must not end the service of all ranks)
                say(f"queue: while answering a peer:\n{traceback.format_exc()}")
                error = PeerError("the rollout process could not answer: see its log")
                await self._send(route.bytes, messages.failed(error))

    async def _receive(self, route: bytes, frames: list[zmq.Frame]) -> None:
        rank = self._rank_of(frames[0])
        try:
            # libzmq's own ids begin with a zero byte and are never used again.  One of the peer's choice could be that
            # of an earlier connection, and what was sent over that would count as sent over this one.
            if route[:1] != b"\0":
                raise WireError(f"a message comes from an unnamed socket, this one from {route[:40]!r}")
            message = messages.read_from_client([frame.buffer for frame in frames])
        except WireError as error:
            say(f"queue: trainer DP rank {rank.number}: {error}")
            await self._send(route, messages.failed(error))
            return
        match message:
            case messages.Hello():
                await self._hello(rank, route, message)
            case messages.Fetch():
                await self._fetch(rank, route, message)
            case messages.Call():
                await self._call(rank, route, message)

    async def _hello(self, rank: Rank, route: bytes, hello: messages.Hello) -> None:
        """Welcome the client, or say what does not fit."""
        if refusal := rank.refusal(hello, self._plan, len(self._ranks)):
            say(f"queue: {refusal}")
            await self._send(route, messages.failed(refusal, messages.HELLO))
        else:
            welcome = messages.Welcome(messages.PROTOCOL, self._plan.run_id, self._plan.attempt)
            await self._send(route, [messages.pack(welcome)])

    # ---- shares

    async def _fetch(self, rank: Rank, route: bytes, fetch: messages.Fetch) -> None:
        """Drop what has arrived, and send the parts that are ready and asked for."""
        to: messages.Request = ("share", fetch.first)
        if self._failure:
            await self._send(route, messages.failed(self._failure, to))
        elif fetch.first < rank.first:
            what = f"the share of rollout {fetch.first} was delivered to trainer DP rank {rank.number} before"
            await self._send(route, messages.failed(PeerError(what), to))
        else:
            rank.route, rank.first, rank.last = route, fetch.first, fetch.last
            rank.shares = {number: share for number, share in rank.shares.items() if number >= rank.first}
            if not await self._deliver(rank):
                await self._send(route, _PENDING)

    async def _deliver(self, rank: Rank) -> bool:
        """Send the rank the shares that it wants and was not sent over its connection; whether there were any."""
        due = [share for number, share in rank.shares.items() if rank.first <= number <= rank.last]
        return any([await self._send_once(rank.route, share) for share in due])

    # ---- calls

    async def _call(self, rank: Rank, route: bytes, asked: messages.Call) -> None:
        """Start the handler if this call is new; repeat the answer if there is one."""
        call = rank.calls.get(asked.client)
        if call is None or asked.number > call.number:
            call = rank.calls[asked.client] = _Call(asked.number, route)
            self._spawn(self._run(call, asked))
        elif asked.number == call.number:
            call.route = route
            if call.answer is None or not await self._send_once(route, call.answer):
                await self._send(route, _PENDING)

    async def _run(self, call: _Call, asked: messages.Call) -> None:
        to: messages.Request = ("call", asked.number)
        try:
            if self._failure:
                raise self._failure
            if asked.method not in self._handlers:
                methods = ", ".join(sorted(self._handlers))
                raise PeerError(f"the rollout process has no method {asked.method!r}, only {methods}")
            result = messages.pack(await self._handlers[asked.method](asked.params))
            frames = messages.answer(to, [result])
        except HpcrlError as error:
            frames = messages.failed(error, to)
        except Exception as error:  # noqa: BLE001  (the caller must learn of it, the server must live on)
            say(f"queue: the handler of {asked.method}:\n{traceback.format_exc()}")
            what = f"{asked.method} failed in the rollout process: {type(error).__name__}: {error}"
            frames = messages.failed(PeerError(what, "see its log"), to)
        await self._finish(call, frames)

    async def _finish(self, call: _Call, frames: list[Buffer]) -> None:
        """Keep the answer of a call that has none, and send it."""
        if call.answer is None:
            call.answer = _Answer(frames)
            await self._send_once(call.route, call.answer)

    # ---- sending

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            say(f"queue: {type(error).__name__}: {error}")

    async def _send_once(self, route: bytes, answer: _Answer) -> bool:
        """Send an answer that this connection has not been given; whether it was sent."""
        if answer.route == route or not await self._send(route, answer.frames):
            return False
        answer.route = route
        return True

    async def _send(self, route: bytes, frames: list[Buffer]) -> bool:
        """Send at once or not at all; False if the peer is gone or takes nothing: it will come back and ask again."""
        try:
            await self._socket.send_multipart([route, *frames], zmq.DONTWAIT, copy=False)
            return True
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
