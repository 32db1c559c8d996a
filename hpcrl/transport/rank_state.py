"""What the server keeps for each data-parallel rank: its client, the shares that it still has to get, what it asked.

Pure book-keeping, without sockets or clocks of its own.  Invariants: a rank has one client at a time, the one that came
last, and one that was replaced never comes back; a call of that client is new once.  Shares leave in order of their
rollout id; at most `credit` parts are sent and not acknowledged; a share is let go only when all its parts are
acknowledged by one client, or when the client asks for a later one, so that a client that dies in between leaves
nothing half delivered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hpcrl.errors import HpcrlError, PeerError
from hpcrl.plan import Plan
from hpcrl.transport.messages import PROTOCOL, Failed, Hello, Reply, SharePart, failed, split
from hpcrl.transport.share_format import Buffer, WireError


@dataclass
class _Share:
    """One share: its parts, the time each was last sent, and those that have arrived."""

    sizes: list[int]
    parts: list[list[memoryview]]
    sent: dict[int, float] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    repeats: int = 0

    @property
    def under_way(self) -> int:
        return len(self.sent.keys() - self.arrived)


class PendingShares:
    """The shares of one rank, from `put` until they are acknowledged.

    Attributes:
        lease: seconds that a part may be under way to a client that says that it lacks it, before it is sent again;
            doubled with every repetition, so that a slow network is not flooded.
    """

    def __init__(self, lease: float, part_bytes: int) -> None:
        self._lease = lease
        self._part_bytes = part_bytes
        self._shares: dict[int, _Share] = {}
        self._credit = 0  # nothing leaves before the client has given credit
        self.last_put = self.last_done = -1

    def __len__(self) -> int:
        return len(self._shares)

    def __contains__(self, rollout_id: int) -> bool:
        return rollout_id in self._shares

    @property
    def under_way(self) -> int:
        """Parts of all shares that are sent and not acknowledged."""
        return sum(share.under_way for share in self._shares.values())

    def put(self, rollout_id: int, frames: Sequence[Buffer]) -> None:
        """Keep a share until it is acknowledged.

        Raises:
            ValueError: if its id does not come after those before.
        """
        if rollout_id <= self.last_put:
            raise ValueError(f"the share of rollout {rollout_id} was put after that of rollout {self.last_put}")
        self._shares[rollout_id] = _Share(
            [memoryview(frame).nbytes for frame in frames], split(frames, self._part_bytes)
        )
        self.last_put = rollout_id

    def reconnected(self, same_client: bool) -> None:
        """Nothing is under way any more, no credit is left; a new client has none of what an earlier one
        acknowledged."""
        self._credit = 0
        for share in self._shares.values():
            share.sent.clear()
            if not same_client:
                share.arrived.clear()

    def want(self, rollout_id: int, credit: int, have: Iterable[int], now: float) -> None:
        """The client waits for this rollout: it has those before, and `have` of this one.  See `PendingShares` for the
        lease."""
        self._credit = credit
        for earlier in [number for number in self._shares if number < rollout_id]:
            self._let_go(earlier)
        self.last_done = max(self.last_done, rollout_id - 1)
        for part in have:
            self.acknowledge(rollout_id, part)
        if share := self._shares.get(rollout_id):
            overdue = [
                part
                for part, when in share.sent.items()
                if part not in share.arrived and now - when > self._lease * 2**share.repeats
            ]
            share.repeats += bool(overdue)
            for part in overdue:
                del share.sent[part]

    def acknowledge(self, rollout_id: int, part: int) -> None:
        """The part has arrived.  What is not known (any more) is not an error: acknowledgements are repeated too."""
        share = self._shares.get(rollout_id)
        if share is None or part >= len(share.parts):
            return
        share.arrived.add(part)
        if len(share.arrived) == len(share.parts):
            self._let_go(rollout_id)

    def due(self, now: float) -> Iterator[tuple[SharePart, list[memoryview]]]:
        """Messages to send now, with their pieces; each counts as under way from here on."""
        room = self._credit - self.under_way
        for rollout_id, share in self._shares.items():
            for part, pieces in enumerate(share.parts):
                if room <= 0:
                    return
                if part not in share.sent and part not in share.arrived:
                    share.sent[part] = now
                    room -= 1
                    yield SharePart(rollout_id, part, len(share.parts), share.sizes), pieces

    def _let_go(self, rollout_id: int) -> None:
        del self._shares[rollout_id]
        self.last_done = max(self.last_done, rollout_id)


# ---- the rank

#: calls of one rank that may run at the same time; malformed messages of one rank that are logged
MAX_CALLS, MAX_COMPLAINTS = 16, 20
#: clients of one rank that were replaced and are still known by name: more than a run ever restarts one
MAX_REPLACED = 1000


@dataclass
class RankConnection:
    """The connection of a rank's present client.

    Attributes:
        waits_for: the rollout that it fetches.
    """

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

    def register_call(self, call_id: int) -> bool:
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

    def __init__(self, number: int, outbox: PendingShares) -> None:
        self.number = number
        self.outbox = outbox
        self.calls = Calls()
        self.seat: RankConnection | None = None
        self.complaints = 0
        self._replaced: dict[str, None] = {}

    @property
    def name(self) -> str:
        """The rank as an error names it."""
        return (
            f"trainer DP rank {self.number} on "
            f"{self.seat.host if self.seat else 'an unknown host (it never connected)'}"
        )

    def refusal(self, hello: Hello, plan: Plan, dp_size: int) -> HpcrlError | None:
        """Why a client that says `hello`, and holds this rank's key, cannot take its place; None if it can."""
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
                f"{here} belongs to run {its[0]}, attempt {its[1]}; the rollout process to run {mine[0]}, attempt "
                f"{mine[1]}"
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

    def refuse_fetch(self, wanted: int | None, failure: HpcrlError | None) -> Failed | None:
        """The answer to a fetch of rollout `wanted` that will get no share."""
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
        return None

    def complain(self) -> bool:
        """Count a message that is malformed or refused; whether it is to be logged."""
        self.complaints += 1
        return self.complaints <= MAX_COMPLAINTS

    def sit(self, route: bytes, hello: Hello) -> RankConnection:
        """Give the seat to this client; a new one starts afresh, the same one continues over its new connection."""
        same = self.seat is not None and self.seat.client == hello.client
        if self.seat is not None and not same:
            self._replaced[self.seat.client] = None
            if len(self._replaced) > MAX_REPLACED:
                del self._replaced[next(iter(self._replaced))]
            self.calls = Calls()
        self.outbox.reconnected(same)
        self.seat = RankConnection(self.number, route, hello.client, f"{hello.host} (pid {hello.pid})")
        return self.seat
