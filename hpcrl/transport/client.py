"""The rollout queue's client: lives in the first trainer rank of each data-parallel rank; blocking, for one thread.

Invariants: every wait has a deadline, ends soon after another process of the attempt has failed (on one host within
0.2 s; on several the host's own process ends it), and its error names role, host and what was awaited; once the run is
asked to stop, nothing waits for a silent server; a request is sent again until it is answered; a share is
acknowledged only when it has been checked.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from hpcrl.errors import DeadlineError, PeerError
from hpcrl.plan import Plan
from hpcrl.run.peers import RolloutPeer, wait_for
from hpcrl.run.rundir import STOP, RunDir
from hpcrl.transport import auth, messages, sockets
from hpcrl.transport.messages import cut
from hpcrl.transport.share_format import Buffer, Share, WireError, decode
from hpcrl.utils.waiting import Deadline, LastSign

#: seconds between looks of rank 0 at the run directory of a run on several hosts; between repetitions of what is
#: unanswered
FIRST_LOOK, REPEAT = 1.0, 1.0
#: kinds of failed handshakes that the monitor tells; the first is the server's refusal of our key
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_FAILED = _REFUSED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


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
    """

    def __init__(
        self,
        rundir: RunDir,
        plan: Plan,
        dp_rank: int,
        dp_size: int,
        timeout: float,
        patience: float = 30.0,
    ) -> None:
        self._rundir = rundir
        self._plan = plan
        self._rank = dp_rank
        self._timeout = timeout
        self._patience = patience
        every = plan.rank_look()
        self._every = min(every, FIRST_LOOK) if dp_rank == 0 else every
        self._looked = LastSign(ago=self._every)
        self._given_up = False
        self.stop_seen: LastSign | None = None  # when it was first seen that the run is asked to stop
        self._name = secrets.token_hex(8)
        self._calls = -1
        self._answers: dict[messages.Request, list[Buffer]] = {}  # what has arrived: at most one share is ahead
        self._welcomed = self._shut_out = False
        end = Deadline(timeout)
        self._open(self._address(wait_for(rundir, RolloutPeer, 0, timeout)))
        hello = messages.Hello(messages.PROTOCOL, plan.run_id, plan.attempt, dp_rank, dp_size, socket.gethostname())
        try:
            self._ask(messages.HELLO, messages.pack(hello), end, "did not welcome")
        except BaseException:
            self.close()
            raise

    # ---- what the trainer does

    def fetch(self, rollout_id: int, timeout: float | None = None) -> Share:
        """This rank's share of a rollout, waited for; that of the next is asked for, too, and comes meanwhile.

        The share's arrays are views on what was received.  Late after `timeout` seconds (a later fetch continues
        where this one stopped), PeerError if the rollout process answers an error or another process of the attempt
        fails.
        """
        to: messages.Request = ("share", rollout_id)
        self._answers = {its: frames for its, frames in self._answers.items() if its >= to}  # of shares: what is ahead
        request = messages.pack(messages.Fetch(rollout_id, rollout_id + 1))
        what = f"did not deliver the samples of rollout {rollout_id} to"
        share = decode(self._ask(to, request, self._deadline(timeout), what))
        self._send(messages.pack(messages.Fetch(rollout_id + 1, rollout_id + 1)))
        return share

    def call(self, method: str, timeout: float | None = None, **params: Any) -> dict[str, Any]:
        """The result of a method of the rollout process, which runs once even if the connection breaks in between.

        Late after `timeout` seconds, Unanswered if the run is to stop and the rollout process is silent; otherwise the
        HpcrlError that the method answered, PeerError if it failed or another process of the attempt did.
        """
        self._calls += 1
        try:
            request = messages.pack(messages.Call(self._name, self._calls, method, params))
        except WireError as error:
            raise WireError(f"the parameters of {method}: {error.what}") from error
        what = f"did not answer {method!r} of"
        (result,) = self._ask(("call", self._calls), request, self._deadline(timeout), what)
        return messages.read_result(result)

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
        sockets.keep_freed_memory()
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

    # ---- asking

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._timeout if timeout is None else timeout)

    def _ask(self, to: messages.Request, request: bytes, end: Deadline, awaited: str) -> list[Buffer]:
        """The frames of the answer to a request, which is sent until it is there; see the class for what ends it."""
        self._check_stop()
        self._send(request)
        asked, sent = LastSign(), LastSign()
        while not self._arrived(to, min(end.left, self._every, max(0.0, REPEAT - sent.silence))):
            self._check_stop()
            if self._silent(asked):
                raise Unanswered(f"{self._where} {awaited} {self._me()} once the run was asked to stop")
            if end.over:
                raise self._late(awaited, end.seconds)
            if sent.due(REPEAT):
                self._send(request)
        return self._answers.pop(to)

    def _send(self, request: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # no peer is there yet: what is queued already will do
            self._socket.send_multipart(cut(request), zmq.DONTWAIT)

    def _arrived(self, to: messages.Request, seconds: float) -> bool:
        """Whether this answer is there; if not, after taking what comes within so many seconds."""
        if to not in self._answers:
            for sock, _ in self._poller.poll(1000 * seconds):
                if sock is self._monitor:
                    self._look_at_handshake()
                while sock is self._socket and to not in self._answers and sock.poll(0):
                    self._receive(to)
        return to in self._answers

    def _receive(self, awaited: messages.Request) -> None:
        first, *pieces = self._socket.recv_multipart(copy=False)
        message = messages.read_from_server(first.buffer)
        self._heard.heard()
        match message:
            case messages.Failed() if message.to in (None, awaited):
                raise messages.error_of(message)
            case messages.Answer() if message.to == awaited or message.to[0] == "share":
                self._answers[message.to] = messages.join(message.sizes, [piece.buffer for piece in pieces])
            case messages.Welcome():
                self._check_welcome(message)
                self._welcomed = True
                self._answers[messages.HELLO] = []

    def _check_welcome(self, welcome: messages.Welcome) -> None:
        mine = self._plan.run_id, self._plan.attempt, messages.PROTOCOL
        its = welcome.run_id, welcome.attempt, welcome.protocol
        if mine != its:
            said = [
                f"run {run_id}, attempt {attempt}, protocol {protocol}" for run_id, attempt, protocol in (its, mine)
            ]
            raise PeerError(f"{self._where} belongs to {said[0]}; {self._me()} to {said[1]}")

    # ---- what ends a wait

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
                f"do {self._rundir.keys} and the server belong to the same attempt?",
            )
