"""What one data-parallel rank still has to get, and what of it is under way.

A pure book-keeper without sockets or clocks of its own.  Invariants: shares leave in order of their rollout id; at most
`credit` parts are sent and not acknowledged; a share is let go only when all its parts are acknowledged by one client,
or when the client asks for a later one, so that a client that dies in between leaves nothing half delivered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hpcrl.queue.messages import Part, split
from hpcrl.queue.share_format import Buffer


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


class Outbox:
    """The shares of one rank, from `put` until they are acknowledged.

    lease: seconds that a part may be under way to a client that says that it lacks it, before it is sent again; doubled
    with every repetition, so that a slow network is not flooded.
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

    def put(self, rollout_id: int, frames: Sequence[Buffer]) -> None:
        """Keep a share until it is acknowledged.  ValueError if its id does not come after those before."""
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
        """The client waits for this rollout: it has those before, and `have` of this one.  See `Outbox` for the
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
        """The part has arrived.  What is not known (any more) is no error: acknowledgements are repeated too."""
        share = self._shares.get(rollout_id)
        if share is None or part >= len(share.parts):
            return
        share.arrived.add(part)
        if len(share.arrived) == len(share.parts):
            self._let_go(rollout_id)

    def due(self, now: float) -> Iterator[tuple[Part, list[memoryview]]]:
        """Messages to send now, with their pieces; each counts as under way from here on."""
        room = self._credit - sum(share.under_way for share in self._shares.values())
        for rollout_id, share in self._shares.items():
            for part, pieces in enumerate(share.parts):
                if room <= 0:
                    return
                if part not in share.sent and part not in share.arrived:
                    share.sent[part] = now
                    room -= 1
                    yield Part(rollout_id, part, len(share.parts), share.sizes), pieces

    def _let_go(self, rollout_id: int) -> None:
        del self._shares[rollout_id]
        self.last_done = max(self.last_done, rollout_id)
