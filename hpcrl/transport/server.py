"""The rollout queue's server: lives in the rollout process, gives each data-parallel rank its shares, answers calls.

    ROUTER, CURVE with a ZAP allow-list, bound to the rollout's host on a port that the system chose

Invariants: a rank is known by its key and gets its own shares only; a share is kept until its rank has acknowledged it,
and a client that comes back, or takes the place of a dead one, gets what is not acknowledged once more; a call runs its
handler once, however often it arrives; nothing that a peer sends ends the server.
"""

from __future__ import annotations

import asyncio
import socket
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import zmq
import zmq.asyncio

from hpcrl.errors import DeadlineError, HpcrlError, PeerError
from hpcrl.plan import Plan
from hpcrl.run.peers import RolloutPeer, publish
from hpcrl.run.role import say
from hpcrl.run.rundir import RunDir
from hpcrl.transport import auth, messages, sockets
from hpcrl.transport.buffer_pool import keep_freed_memory
from hpcrl.transport.rank_state import MAX_CALLS, Calls, PendingShares, Rank, RankConnection
from hpcrl.transport.share_format import Buffer, Share, WireError, encode
from hpcrl.utils.deadline import Deadline

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class QueueServer:
    """The server of one attempt; every method runs in one event loop.

    Attributes:
        handlers: method -> coroutine function from parameters to result, both dicts of what msgpack can carry; each
            call is a task of its own.
        depth: shares that a rank may leave unacknowledged before `put` waits.
        lease: see `PendingShares`.
        part_bytes: greatest part of a share.
    """

    def __init__(
        self,
        rundir: RunDir,
        plan: Plan,
        dp_size: int,
        handlers: Mapping[str, Handler],
        *,
        depth: int = 4,
        lease: float = 60.0,
        part_bytes: int = messages.PART_BYTES,
    ) -> None:
        self._rundir = rundir
        self._plan = plan
        self._handlers = dict(handlers)
        self._depth = depth
        self._ranks = [Rank(number, PendingShares(lease, part_bytes)) for number in range(dp_size)]
        self._seats: dict[bytes, RankConnection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: PeerError | None = None
        self._progress = asyncio.Event()
        self._context: zmq.asyncio.Context | None = None
        self._door: auth.CurveAuthenticator | None = None

    # ---- life

    async def start(self) -> None:
        """Bind, let the clients in, and publish address and public key as peer rollout-0.

        Raises:
            HpcrlError: if that fails.
        """
        host = sockets.bind_address(self._plan)
        keep_freed_memory()
        self._context = zmq.asyncio.Context(io_threads=min(4, len(self._ranks)))
        self._socket = self._context.socket(zmq.ROUTER)
        sockets.set_limits(self._socket, server=True)
        self._socket.router_mandatory = True  # a send to a peer that is gone is an error, not silence
        public_key = self._lock()
        try:
            self._socket.bind(sockets.endpoint(host, 0))
        except zmq.ZMQError as error:
            raise HpcrlError(
                f"rollout: the queue cannot listen on {host}: {error.strerror}", "is this the host that the plan names?"
            ) from error
        port = int(self._socket.last_endpoint.rsplit(b":", 1)[1])
        self._spawn(self._listen())
        peer = RolloutPeer(
            host=host, port=port, public_key=public_key, run_id=self._plan.run_id, attempt=self._plan.attempt
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

    def _lock(self) -> str:
        """Admit the clients of this attempt only; the public key of this server."""
        keys = auth.server_keys(self._rundir)
        self._door = auth.CurveAuthenticator(self._context, keys, say)
        auth.lock_server(self._socket, keys)
        return keys.public

    def _rank_of(self, frame: zmq.Frame) -> Rank:
        """The rank that the connection behind `frame` belongs to."""
        return self._ranks[auth.rank_of(frame)]

    # ---- what the rollout process does

    async def put(self, rollout_id: int, shares: Sequence[Share], timeout: float = 3600.0) -> None:
        """Hand over one share per data-parallel rank.

        Ids must go up. The arrays must not change until the shares are acknowledged. Waits while a rank has `depth`
        unacknowledged shares.

        Raises:
            DeadlineError: names the ranks after `timeout` seconds, PeerError after `fail`.
        """
        if len(shares) != len(self._ranks) or any(share.rollout_id != rollout_id for share in shares):
            raise ValueError(
                f"rollout {rollout_id}: one share of that rollout for each of {len(self._ranks)} ranks expected"
            )
        frames = [encode(share) for share in shares]
        await self._room(rollout_id, timeout)
        for rank, its_frames in zip(self._ranks, frames, strict=True):
            rank.outbox.put(rollout_id, its_frames)
        await self._update()

    async def fail(self, message: str) -> None:
        """Answer every fetch and call, waiting or to come, with this error."""
        self._failure = self._failure or PeerError(message)
        for rank in self._ranks:
            for call_id in rank.calls.unanswered():
                await self._finish(rank, rank.calls, messages.failed(self._failure, call_id))
        await self._update()

    async def _room(self, rollout_id: int, timeout: float) -> None:
        end = Deadline(timeout)
        while not self._failure and (full := [rank for rank in self._ranks if len(rank.outbox) >= self._depth]):
            self._progress.clear()
            try:
                await asyncio.wait_for(self._progress.wait(), end.left)
            except TimeoutError:
                who = ", ".join(rank.name for rank in full)
                what = (
                    f"{who} took none of {self._depth} waiting shares within {timeout:g} s; rollout {rollout_id} waits "
                    "behind them"
                )
                raise DeadlineError(what, f"see the trainer's logs in {self._rundir.logs}") from None
        if self._failure:
            raise self._failure

    # ---- what clients say

    async def _listen(self) -> None:
        while True:
            route, *frames = await self._socket.recv_multipart(copy=False)
            try:
                await self._receive(route.bytes, frames)
            except Exception:  # noqa: BLE001  (a defect in one answer must not end the service of all ranks)
                say(f"queue: while answering a peer:\n{traceback.format_exc()}")
                await self._send(route.bytes, messages.Failed("the rollout process could not answer: see its log"))

    async def _receive(self, route: bytes, frames: list[zmq.Frame]) -> None:
        rank = self._rank_of(frames[0])
        try:
            # libzmq's own ids begin with a zero byte and are never used again.  An id of the peer's choice could be
            # that of a rank that left, and what is under way to that rank would go to the wrong one.
            if not frames or route[:1] != b"\0":
                raise WireError(f"a message comes from an unnamed socket, this one from {route[:40]!r}")
            message = messages.read_from_client(messages.whole([frame.buffer for frame in frames]))
        except WireError as error:
            if rank.complain():
                say(f"queue: trainer DP rank {rank.number}: {error}")
            await self._send(route, messages.failed(error))
            return
        if isinstance(message, messages.Hello):
            await self._hello(rank, route, message)
        elif (seat := self._seats.get(route)) is None:
            await self._send(route, messages.WhoAreYou())
        else:
            await self._obey(rank, seat, message)

    async def _hello(self, rank: Rank, route: bytes, hello: messages.Hello) -> None:
        """Give the client its rank's seat, or say what does not fit."""
        if refusal := rank.refusal(hello, self._plan, len(self._ranks)):
            if rank.complain():
                say(f"queue: {refusal}")
            await self._send(route, messages.failed(refusal))
            return
        if route not in self._seats:  # a Hello may come twice over one connection
            if rank.seat is not None:
                self._seats.pop(rank.seat.route, None)
            self._seats[route] = rank.sit(route, hello)
        await self._send(
            route, messages.Welcome(messages.PROTOCOL, self._plan.run_id, self._plan.attempt, socket.gethostname())
        )

    async def _obey(self, rank: Rank, seat: RankConnection, message: messages.FromClient) -> None:
        match message:
            case messages.Fetch(rollout_id=wanted):
                seat.waits_for = wanted
                if wanted in rank.outbox or wanted > rank.outbox.last_done:
                    rank.outbox.want(wanted, message.credit, message.have, time.monotonic())
                    self._release(rank, seat)
                await self._deliver(rank, seat)
            case messages.Ack():
                rank.outbox.acknowledge(message.rollout_id, message.part)
                self._release(rank, seat)
                await self._deliver(rank, seat)
            case messages.Call():
                await self._call(rank, message)
            case messages.Ping():
                await self._send(seat.route, messages.Pong())

    # ---- shares

    def _release(self, rank: Rank, seat: RankConnection) -> None:
        """Shares may have been acknowledged: `put` may continue, and a fetch that has all it asked for is over."""
        if seat.waits_for is not None and seat.waits_for <= rank.outbox.last_done:
            seat.waits_for = None
        self._progress.set()

    async def _update(self) -> None:
        """Something changed that fetches or puts may wait for."""
        self._progress.set()
        for seat in list(self._seats.values()):
            await self._deliver(self._ranks[seat.rank], seat)

    async def _deliver(self, rank: Rank, seat: RankConnection) -> None:
        """Send the seat what its fetch can have now, and of later shares what its credit allows."""
        if answer := rank.refuse_fetch(seat.waits_for, self._failure):
            seat.waits_for = None
            await self._send(seat.route, answer)
            return
        for part, pieces in list(rank.outbox.due(time.monotonic())):
            if not await self._send(seat.route, part, pieces):
                return

    # ---- calls

    async def _call(self, rank: Rank, call: messages.Call) -> None:
        """Start the handler if this call is new; repeat the answer if there is one."""
        if not rank.calls.register_call(call.call_id):
            await self._answer(rank, call.call_id)
        elif self._failure:
            await self._finish(rank, rank.calls, messages.failed(self._failure, call.call_id))
        elif call.method not in self._handlers:
            what = f"the rollout process has no method {call.method!r}, only {', '.join(sorted(self._handlers))}"
            await self._finish(rank, rank.calls, messages.Failed(what, call_id=call.call_id))
        elif len(rank.calls.unanswered()) > MAX_CALLS:
            what = f"{MAX_CALLS} calls of {rank.name} are still running"
            await self._finish(rank, rank.calls, messages.Failed(what, call_id=call.call_id))
        else:
            self._spawn(self._run(rank, rank.calls, call))

    async def _run(self, rank: Rank, calls: Calls, call: messages.Call) -> None:
        try:
            result = await self._handlers[call.method](call.params)
            answer: messages.Reply | messages.Failed = messages.Reply(call.call_id, result)
            messages.pack(answer)
        except HpcrlError as error:
            answer = messages.failed(error, call.call_id)
        except Exception as error:  # noqa: BLE001  (the caller must learn of it, the server must live on)
            say(f"queue: the handler of {call.method}:\n{traceback.format_exc()}")
            what = f"{call.method} failed in the rollout process: {type(error).__name__}: {error}"
            answer = messages.failed(PeerError(what, "see its log"), call.call_id)
        await self._finish(rank, calls, answer)

    async def _finish(self, rank: Rank, calls: Calls, answer: messages.Reply | messages.Failed) -> None:
        """Keep the answer, and send it if the client that asked is still there."""
        if calls.finish(answer) and calls is rank.calls:
            await self._answer(rank, answer.call_id)

    async def _answer(self, rank: Rank, call_id: int) -> None:
        if rank.seat is not None and (answer := rank.calls.answer(call_id)):
            await self._send(rank.seat.route, answer)

    # ---- sending

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            say(f"queue: {type(error).__name__}: {error}")

    async def _send(self, route: bytes, message: messages.FromServer, pieces: Sequence[Buffer] = ()) -> bool:
        """Send at once or not at all; False if the peer is gone or takes nothing: it will come back and say Hello."""
        try:
            await self._socket.send_multipart([route, *messages.to_client(message, pieces)], zmq.DONTWAIT, copy=False)
            return True
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._seats.pop(route, None)
            return False
