"""What the server keeps for each data-parallel rank: who sits there, what it still has to get, what it asked.

Pure book-keeping.  Invariants: a rank has one client at a time, the one that came last, and one that was replaced never
comes back; a call of that client is new once.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcrl.errors import HpcrlError, PeerError
from hpcrl.plan import Plan
from hpcrl.queue.messages import PROTOCOL, Failed, Hello, Reply, StoppedAt, failed
from hpcrl.queue.outbox import Outbox
from hpcrl.queue.share_format import WireError

#: calls of one rank that may run at the same time; malformed messages of one rank that are logged
MAX_CALLS, MAX_COMPLAINTS = 16, 20
#: clients of one rank that were replaced and are still known by name: more than a run ever restarts one
MAX_REPLACED = 1000


@dataclass
class Seat:
    """The connection of a rank's present client; waits_for: the rollout that it fetches."""

    rank: int
    route: bytes
    client: str
    host: str
    waits_for: int | None = None


class Calls:
    """The calls of a rank's present client, and their answers for as long as the client may ask again."""

    def __init__(self) -> None:
        self._last = -1
        self._answers: dict[int, Reply | Failed | None] = {}

    def begin(self, call_id: int) -> bool:
        """Whether the call is new.  Finished calls before it are forgotten: a client asks one thing at a time."""
        if call_id <= self._last:
            return False
        self._last = call_id
        self._answers = {number: answer for number, answer in self._answers.items() if answer is None}
        self._answers[call_id] = None
        return True

    def finish(self, answer: Reply | Failed) -> bool:
        """Keep the answer of a call; False if it has one already, or is not known (any more)."""
        if answer.call_id is None or self._answers.get(answer.call_id, answer) is not None:
            return False
        self._answers[answer.call_id] = answer
        return True

    def answer(self, call_id: int) -> Reply | Failed | None:
        """The answer of a call, if there is one."""
        return self._answers.get(call_id)

    def unanswered(self) -> list[int]:
        return [number for number, answer in self._answers.items() if answer is None]


class Rank:
    """One data-parallel rank, across connections."""

    def __init__(self, number: int, outbox: Outbox) -> None:
        self.number = number
        self.outbox = outbox
        self.calls = Calls()
        self.seat: Seat | None = None
        self.complaints = 0
        self._replaced: dict[str, None] = {}

    @property
    def name(self) -> str:
        """The rank as an error names it."""
        return f"trainer DP rank {self.number} on {self.seat.host if self.seat else 'an unknown host (it never connected)'}"

    def refusal(self, hello: Hello, plan: Plan, dp_size: int) -> HpcrlError | None:
        """Why whoever says `hello`, and holds this rank's key, cannot have its seat; None if it can."""
        here = f"trainer DP rank {self.number} on {hello.host}"
        mine = (plan.run_id, plan.attempt)
        its = (hello.run_id, hello.attempt)
        if hello.protocol != PROTOCOL:
            return WireError(
                f"{here} speaks queue protocol {hello.protocol}, the rollout process {PROTOCOL}",
                "use one version of hpcrl on all hosts",
            )
        if mine != its:
            return PeerError(
                f"{here} belongs to run {its[0]}, attempt {its[1]}; the rollout process to run {mine[0]}, attempt {mine[1]}"
            )
        if hello.dp_rank != self.number:
            return PeerError(
                f"{here} says that it is DP rank {hello.dp_rank}, but holds the key of DP rank {self.number}"
            )
        if hello.dp_size != dp_size:
            return PeerError(f"{here} counts {hello.dp_size} DP ranks, the rollout process {dp_size}")
        if hello.client in self._replaced:
            return PeerError(f"{here} (pid {hello.pid}) was replaced: {self.name} has its place")
        return None

    def refuse_fetch(
        self, wanted: int | None, stop: int | None, failure: HpcrlError | None
    ) -> Failed | StoppedAt | None:
        """The answer to a fetch of rollout `wanted` that will get no share; stop: the first rollout that is not
        made."""
        if wanted is None:
            return None
        if failure:
            return failed(failure, rollout_id=wanted)
        if wanted in self.outbox:
            return None
        if wanted <= self.outbox.last_done:
            return Failed(
                f"the share of rollout {wanted} was delivered to trainer DP rank {self.number} before",
                rollout_id=wanted,
            )
        return StoppedAt(wanted) if stop is not None and wanted >= stop else None

    def complain(self) -> bool:
        """Count a message that is malformed or refused; whether it is to be logged."""
        self.complaints += 1
        return self.complaints <= MAX_COMPLAINTS

    def sit(self, route: bytes, hello: Hello) -> Seat:
        """Give the seat to this client; a new one starts afresh, the same one goes on over its new connection."""
        same = self.seat is not None and self.seat.client == hello.client
        if self.seat is not None and not same:
            self._replaced[self.seat.client] = None
            if len(self._replaced) > MAX_REPLACED:
                del self._replaced[next(iter(self._replaced))]
            self.calls = Calls()
        self.outbox.reconnected(same)
        self.seat = Seat(self.number, route, hello.client, f"{hello.host} (pid {hello.pid})")
        return self.seat
