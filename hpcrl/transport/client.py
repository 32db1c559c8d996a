"""The rollout queue's client: lives in the first trainer rank of each data-parallel rank; blocking, for one thread.

Invariants: every wait has a deadline, ends soon after another process of the attempt has failed (on one host within
0.2 s; on several the host's own process ends it), and its error names role, host and what was awaited; once the run is
asked to stop, nothing waits for a silent server; a share is returned once, whole, however often its parts arrive; the
last part of a share is acknowledged only when the share has been checked.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from hpcrl.errors import DeadlineError, HpcrlError, PeerError
from hpcrl.plan import Plan
from hpcrl.run.peers import RolloutPeer, wait_for
from hpcrl.run.rundir import STOP, RunDir
from hpcrl.transport import auth, messages, sockets
from hpcrl.transport.buffer_pool import keep_freed_memory
from hpcrl.transport.frames import cut
from hpcrl.transport.share_format import Share, WireError, decode
from hpcrl.utils.deadline import Deadline
from hpcrl.utils.liveness import LastSign

#: seconds between looks of rank 0 at the run directory of a run on several hosts; between repetitions of what is
#: unanswered
FIRST_LOOK, REPEAT = 1.0, 1.0
#: kinds of failed handshakes that the monitor tells; the first is the server's refusal of our key
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_FAILED = _REFUSED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

T = TypeVar("T")


class Late(DeadlineError):
    """What was awaited has not come yet, and nothing is known to be wrong."""


class Unanswered(Late):
    """The run was asked to stop, and the rollout process is silent."""


class QueueClient:
    """One data-parallel rank's end of the queue of one attempt.

    Attributes:
        timeout: seconds for the server to come up and answer the first message, and what `fetch` and `call` wait unless
            told otherwise.
        patience: seconds without any message after which a call is given up, once the run is asked to stop.
        credit: parts that may be under way.
    """

    def __init__(
        self,
        rundir: RunDir,
        plan: Plan,
        dp_rank: int,
        dp_size: int,
        timeout: float,
        patience: float = 30.0,
        credit: int = messages.CREDIT,
    ) -> None:
        self._rundir = rundir
        self._plan = plan
        self._rank = dp_rank
        self._size = dp_size
        self._timeout = timeout
        self._patience = patience
        self._credit = credit
        every = plan.rank_look()
        self._every = min(every, FIRST_LOOK) if dp_rank == 0 else every
        self._looked = LastSign(ago=self._every)
        self._given_up = False
        self.stop_seen: LastSign | None = None  # when it was first seen that the run is asked to stop
        self._name = secrets.token_hex(8)
        self._parts: dict[int, dict[int, tuple[messages.SharePart, list[zmq.Frame]]]] = {}
        self._done = self._calls = -1
        self._awaited: messages.FromClient | None = (
            None  # what is not answered yet, and is said again after a reconnect
        )
        self._welcomed = self._shut_out = False
        end = Deadline(timeout)
        self._open(self._address(wait_for(rundir, RolloutPeer, 0, timeout)))
        try:
            self._send(self._hello())
            self._wait(end, "did not welcome", lambda message: isinstance(message, messages.Welcome) or None)
        except BaseException:
            self.close()
            raise

    # ---- what the trainer does

    def fetch(self, rollout_id: int, timeout: float | None = None) -> Share:
        """This rank's share of a rollout, waited for.

        The share's arrays are views on what was received.  Late after `timeout` seconds (a later fetch continues
        where this one stopped), PeerError if the rollout process answers an error or another process of the attempt
        fails, WireError if what comes is not a valid share.
        """
        self._check_stop()
        self._parts = {number: parts for number, parts in self._parts.items() if number >= rollout_id}
        while self._socket.poll(0):  # what came ahead of its fetch
            self._receive(lambda _: None)
        found = self._complete(rollout_id)
        if found is None:
            end = self._say_done(timeout)
            self._send_until_answered(messages.Fetch(rollout_id, self._credit, sorted(self._parts.get(rollout_id, ()))))
            what = f"did not deliver the samples of rollout {rollout_id} to"
            found = self._wait(end, what, lambda message: self._fetched(rollout_id, message))
            self._awaited = None
        return found

    def call(self, method: str, timeout: float | None = None, **params: Any) -> dict[str, Any]:
        """The result of a method of the rollout process, which runs once even if the connection breaks in between.

        Late after `timeout` seconds, Unanswered if the run is to stop and the rollout process is silent; otherwise the
        HpcrlError that the method answered, PeerError if it failed or another process of the attempt did.
        """
        self._calls += 1
        call_id, end = self._calls, self._say_done(timeout)
        try:
            self._send_until_answered(messages.Call(call_id, method, params))
        except WireError as error:
            raise WireError(f"the parameters of {method}: {error.what}") from error

        def take(message: messages.FromServer) -> messages.Reply | None:
            return message if isinstance(message, messages.Reply) and message.call_id == call_id else None

        reply = self._wait(end, f"did not answer {method!r} of", take)
        self._awaited = None
        return reply.result

    def close(self) -> None:
        """Send what is written, within sockets.LINGER, and let go of the connection."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
            self._context.term()

    # ---- connecting

    def _address(self, peer: RolloutPeer) -> str:
        """Where the server is.

        Raises:
            PeerError: unless what it published is of this run and attempt, and under the key we know.
        """
        mine = (self._plan.run_id, self._plan.attempt)
        its = (peer.run_id, peer.attempt)
        self._keys = auth.client_keys(self._rundir, self._rank)
        self._where = f"rollout-0 on {peer.host}:{peer.port}"
        if mine != its:
            raise PeerError(
                f"{self._where} belongs to run {its[0]}, attempt {its[1]}; {self._me()} to run {mine[0]}, attempt "
                f"{mine[1]}"
            )
        if peer.public_key != self._keys.server:
            raise PeerError(f"{self._where} has another key than {self._rundir.keys} names: it is not of this attempt")
        return sockets.endpoint(peer.host, peer.port)

    def _me(self) -> str:
        return f"trainer DP rank {self._rank} on {socket.gethostname()}"

    def _open(self, address: str) -> None:
        keep_freed_memory()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        sockets.set_limits(self._socket)
        self._socket.reconnect_ivl_max = 2000
        self._lock()
        self._monitor = self._socket.get_monitor_socket(_FAILED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._heard = LastSign()
        self._socket.connect(address)

    def _lock(self) -> None:
        auth.lock_client(self._socket, self._keys)

    def _hello(self) -> messages.Hello:
        plan = self._plan
        return messages.Hello(
            messages.PROTOCOL,
            plan.run_id,
            plan.attempt,
            self._rank,
            self._size,
            self._name,
            socket.gethostname(),
            os.getpid(),
        )

    # ---- waiting

    def _say_done(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    def _wait(self, end: Deadline, awaited: str, take: Callable[[messages.FromServer], T | None]) -> T:
        """What `take` makes of the first message that it does not answer None to; see the class for what ends it."""
        asked = LastSign()
        repeat = time.monotonic() + REPEAT
        while True:
            now = time.monotonic()
            self._check_stop()
            if self._silent(asked):
                raise Unanswered(f"{self._where} {awaited} {self._me()} once the run was asked to stop")
            if end.over:
                raise self._late(awaited, end.seconds)
            if now >= repeat:
                self._repeat()
                repeat = now + REPEAT
            for sock, _ in self._poller.poll(1000 * min(end.left, max(0.0, min(self._every, repeat - now)))):
                if sock is self._monitor:
                    self._look_at_handshake()
                elif (found := self._receive(take)) is not None:
                    return found

    def _check_stop(self) -> None:
        """Look whether the run is asked to stop, if the last look was long enough ago.

        Raises:
            PeerError: if it has failed.
        """
        if not self._looked.due(self._every):
            return
        if STOP in self._rundir.check() and self.stop_seen is None:
            self.stop_seen = LastSign()

    def _silent(self, asked: LastSign) -> bool:
        """Whether the run is to stop, and the server, which was last asked at `asked`, is given up: for good."""
        if self.stop_seen is not None and not self._given_up:
            silence = min(self._heard.silence, self.stop_seen.silence, asked.silence)
            self._given_up = silence > self._patience
        return self._given_up

    def _late(self, awaited: str, seconds: float) -> DeadlineError:
        what = f"{self._where} {awaited} {self._me()} within {seconds:g} s"
        if self._welcomed:
            what += f" (last heard of it {self._heard.silence:.0f} s ago)"
        elif self._shut_out:
            what += " (the encrypted handshake fails: it holds other keys than this attempt's)"
        return Late(what, f"see {self._rundir.logs / 'rollout-0.log'}")

    def _look_at_handshake(self) -> None:
        event = recv_monitor_message(self._monitor)
        self._shut_out = True
        if event["event"] == _REFUSED:
            raise PeerError(
                f"{self._where} refuses the key of {self._me()}",
                f"are {self._rundir.keys} and the server of one attempt?",
            )

    def _send_until_answered(self, message: messages.FromClient) -> None:
        self._send(message)
        self._awaited = message

    def _repeat(self) -> None:
        """Say a fetch again, with what has arrived of it; ask whether we are still known."""
        if isinstance(self._awaited, messages.Fetch):
            self._awaited = messages.Fetch(
                self._awaited.rollout_id, self._credit, sorted(self._parts.get(self._awaited.rollout_id, ()))
            )
            again: messages.FromClient = self._awaited
        else:
            again = messages.Ping() if self._welcomed else self._hello()
        with contextlib.suppress(zmq.Again):  # no peer is there yet: what is queued already will do
            self._socket.send_multipart(cut(messages.pack(again)), zmq.DONTWAIT)

    def _receive(self, take: Callable[[messages.FromServer], T | None]) -> T | None:
        first, *pieces = self._socket.recv_multipart(copy=False)
        message = messages.read_from_server(first.buffer)
        if isinstance(message, messages.Long):
            message = messages.read_from_server(messages.whole([piece.buffer for piece in pieces]))
        self._heard.heard()
        match message:
            case messages.WhoAreYou():
                self._send(self._hello())
                if self._awaited is not None:
                    self._send(self._awaited)
            case messages.Failed() if self._concerns_us(message):
                self._awaited = None
                raise messages.error_of(message)
            case messages.SharePart():
                self._keep(message, pieces)
            case messages.Welcome():
                self._check_welcome(message)
                self._welcomed = True
        return take(message)

    def _concerns_us(self, error: messages.Failed) -> bool:
        """Whether the error is an answer to what we wait for, not to something given up before."""
        if error.call_id is not None:
            return isinstance(self._awaited, messages.Call) and self._awaited.call_id == error.call_id
        if error.rollout_id is not None:
            return isinstance(self._awaited, messages.Fetch) and self._awaited.rollout_id == error.rollout_id
        return True

    def _check_welcome(self, welcome: messages.Welcome) -> None:
        mine = self._plan.run_id, self._plan.attempt, messages.PROTOCOL
        its = welcome.run_id, welcome.attempt, welcome.protocol
        if mine != its:
            said = [
                f"run {run_id}, attempt {attempt}, protocol {protocol}" for run_id, attempt, protocol in (its, mine)
            ]
            raise PeerError(f"{self._where} says that it is of {said[0]}; {self._me()} is of {said[1]}")

    # ---- shares

    def _fetched(self, rollout_id: int, message: messages.FromServer) -> Share | None:
        return (
            self._complete(rollout_id)
            if isinstance(message, messages.SharePart) and message.rollout_id == rollout_id
            else None
        )

    def _keep(self, part: messages.SharePart, pieces: list[zmq.Frame]) -> None:
        """Keep a part that is new.  Parts of the fetched share are acknowledged, so that more come; those of later
        shares are not before their fetch, so that no more than the credit ever waits here."""
        if part.rollout_id <= self._done:
            self._send(messages.Ack(part.rollout_id, part.part))
            return
        parts = self._parts.setdefault(part.rollout_id, {})
        parts.setdefault(part.part, (part, pieces))
        fetched = isinstance(self._awaited, messages.Fetch) and self._awaited.rollout_id == part.rollout_id
        if fetched and len(parts) < part.parts:
            self._send(messages.Ack(part.rollout_id, part.part))

    def _complete(self, rollout_id: int) -> Share | None:
        """The share if all its parts are here; then the rest of them is acknowledged."""
        parts = self._parts.get(rollout_id, {})
        if not parts or len(parts) < (first := next(iter(parts.values()))[0]).parts:
            return None
        if sorted(parts) != list(range(first.parts)) or any(
            (p.parts, p.sizes) != (first.parts, first.sizes) for p, _ in parts.values()
        ):
            raise WireError(f"the parts of the share of rollout {rollout_id} do not fit each other")
        share = decode(
            messages.join(first.sizes, [piece.buffer for number in sorted(parts) for piece in parts[number][1]])
        )
        if share.rollout_id != rollout_id:
            raise WireError(f"the share of rollout {rollout_id} says that it is of rollout {share.rollout_id}")
        for number in parts:
            self._send(messages.Ack(rollout_id, number))
        del self._parts[rollout_id]
        self._done = rollout_id
        return share

    def _send(self, message: messages.FromClient) -> None:
        try:
            self._socket.send_multipart(cut(messages.pack(message)), zmq.DONTWAIT)
        except zmq.Again as error:
            raise HpcrlError(
                f"{self._me()}: {sockets.HIGH_WATER} messages to {self._where} are not sent: it does not read them"
            ) from error
