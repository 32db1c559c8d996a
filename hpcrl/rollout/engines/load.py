"""How busy the engines are: what we count in flight of each, what they say themselves, and how many samples to have in
flight accordingly.

What waits in an engine's queue has been promised and is not begun: it only grows old.  So as soon as requests wait, or
caches are nearly full (an engine then throws out what it has begun), no more are sent than the engines work on, and one
group each; while nothing waits, the limit grows.

Invariants: only `Loads` counts requests in flight; it reads no clock but the one that it is given, and all of its sums
are of integers, so that nothing drifts in a long run.  Without any reading there is no limit but the pool's own; with
one it never is below one group an engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcrl.config.options import Options

#: microseconds: an engine that has requests again within this time was busy throughout, for the timeline
SAME = 100_000


class Loads:
    """Requests in flight of every engine, by its number.

    An engine that was dropped is given no more; those that it still has count nowhere here.

    Attributes:
        total: requests in flight of the engines that are not dropped.
    """

    def __init__(
        self, limit: int, clock: Callable[[], int], busy: Callable[[int, int, int], None] = lambda *_: None
    ) -> None:
        """Create one.

        Args:
            limit: requests that each engine may have.
            clock: microseconds that never go back.
            busy: called with (engine, begin, end) of each period in which an engine had requests.
        """
        self._limit = limit
        self._clock = clock
        self._busy = busy
        self._of: dict[int, int] = {}
        self._spells: dict[int, tuple[int, int | None]] = {}  # (begin, end) of the last busy time; None: it lasts
        self.total = self._most = 0
        self._begun = self._then = clock()
        self._idle = self._held = self._engines = 0  # integrals over time: idle engines, requests, engines

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, engine: int) -> bool:
        return engine in self._of

    def __getitem__(self, engine: int) -> int:
        """What it has in flight; 0 of one that was dropped."""
        return self._of.get(engine, 0)

    def add(self, engine: int) -> None:
        """One more engine, with nothing in flight."""
        self._account()
        self._of[engine] = 0

    def drop(self, engine: int) -> None:
        """An engine that is given no more; asked for twice, the second time does nothing."""
        if engine in self._of:
            self.move(engine, -self._of[engine])
            self._tell(engine, self._account())
            del self._of[engine]

    def move(self, engine: int, by: int) -> None:
        """`by` more requests in flight (or, negative, fewer); nothing for an engine that is not there."""
        if not by or engine not in self._of:
            return
        now, before, load = self._account(), self._of[engine], self._of[engine] + by
        assert load >= 0, f"engine {engine} has {load} requests in flight"
        self._of[engine] = load
        self.total += by
        self._most = max(self._most, self.total)
        begin, end = self._spells.get(engine, (now, now))
        if not before and end is not None and now - end > SAME:
            self._tell(engine, now)
            begin = now
        self._spells[engine] = (begin, None if load else now)

    def least(self) -> int:
        """The engine with fewest in flight; of several, the one that has been there longest."""
        return min(self._of, key=self._of.__getitem__)

    # ---- over time

    def _account(self) -> int:
        """Bring the integrals up to now."""
        now = self._clock()
        passed, self._then = now - self._then, now
        self._idle += passed * list(self._of.values()).count(0)
        self._held += passed * self.total
        self._engines += passed * len(self._of)
        return now

    def _tell(self, engine: int, now: int) -> None:
        """Pass on its last busy period, up to now if it lasts."""
        begin, end = self._spells.pop(engine, (now, now))
        end = now if end is None else end
        if end > begin:
            self._busy(engine, begin, end)

    def measures(self) -> dict[str, float]:
        """Since the last call: the share of the engines' time without any request, their requests as a share of what
        they may have, and requests in flight; nothing where there was no engine.  Busy periods are passed on up to now.
        """
        now = self._account()
        for engine, (_, end) in list(self._spells.items()):
            if end is None or now - end > SAME:
                self._tell(engine, now)
            if end is None:
                self._spells[engine] = (now, None)
        found = {}
        if self._engines:
            found = {
                "perf/engine_idle_ratio": self._idle / self._engines,
                "perf/engine_occupancy": self._held / (self._engines * self._limit),
                "perf/requests_in_flight": self._held / (now - self._begun),
                "perf/requests_in_flight_max": float(self._most),
            }
        self._begun, self._most = now, self.total
        self._idle = self._held = self._engines = 0
        return found

    def close(self) -> None:
        """Tell the busy times that are left."""
        now = self._account()
        for engine in list(self._spells):
            self._tell(engine, now)


# ---- what the engines say: requests that wait, and how full their KV cache is

#: what each living engine says of itself, Prometheus' text, by its number (`EnginePool.metrics_texts`)
MetricsTexts = Callable[[], Awaitable[dict[int, str]]]
FULL = 0.95  #: share of a KV cache from which on it counts as full
#: vLLM's names of what is read
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
CACHE = "vllm:kv_cache_usage_perc"


class EngineMetrics(NamedTuple):
    """What an engine says: requests that it works on, requests that wait there, share of its KV cache in use."""

    running: float
    waiting: float
    cache: float


@dataclass
class ConcurrencyLimit:
    """The limit of samples in flight.

    Attributes:
        group: samples of a group.
        limit: None as long as nothing bounds it.
    """

    group: int
    limit: int | None = None

    def read(self, readings: Sequence[EngineMetrics], in_flight: int) -> None:
        """Take in what living engines say.

        Args:
            in_flight: samples asked for and not answered, the engines' and ours.
        """
        if not readings:
            self.limit = None
            return
        slack = self.group * len(readings)
        if any(one.cache >= FULL for one in readings) or sum(one.waiting for one in readings) > slack:
            self.limit = max(slack, round(sum(one.running for one in readings)) + slack)
        elif self.limit is not None and in_flight + slack >= self.limit:
            self.limit += slack

    def room(self, in_flight: int, wanted: int) -> int:
        """How many of `wanted` groups to issue in addition to `in_flight` samples."""
        return wanted if self.limit is None else max(0, min(wanted, (self.limit - in_flight) // self.group))


def values_of(text: str, names: Sequence[str]) -> dict[str, list[float]] | None:
    """Name -> its values, one for each set of labels, of Prometheus' text; None if it has not all of them."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if name in names:
            try:
                found.setdefault(name, []).append(float(rest.rpartition(" ")[2]))
            except ValueError:
                return None
    return found if len(found) == len(names) else None


def parse(text: str) -> EngineMetrics | None:
    """A reading from Prometheus' text, summed over labels (the fullest cache); None if it has not all of it."""
    if (found := values_of(text, (RUNNING, WAITING, CACHE))) is None:
        return None
    return EngineMetrics(sum(found[RUNNING]), sum(found[WAITING]), max(found[CACHE]))


async def read_metrics(ask: MetricsTexts) -> list[EngineMetrics]:
    """What the living engines say."""
    return [reading for text in (await ask()).values() if (reading := parse(text)) is not None]


# ---- what share of the tokens that engines drafted was accepted while a rollout was made
#
# An engine counts if it answered both when the rollout began and at its end; of one that was silent then, or came
# meanwhile, what it counted before is not known.

#: vLLM's counters: passes in which drafts were checked, tokens drafted, tokens of them accepted
CHECKED = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


class DraftCounts(NamedTuple):
    """What one engine has counted."""

    checked: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0


class AcceptedDrafts:
    """The engines' counters, from `start_rollout` on."""

    def __init__(self, ask: MetricsTexts, options: Options) -> None:
        self._ask = ask
        self._drafting = bool(options.vllm.get("speculative_config"))
        self._before: dict[int, DraftCounts] = {}

    async def start_rollout(self) -> None:
        """A rollout begins."""
        self._before = await self._read()

    async def measures(self) -> dict[str, float]:
        """The metrics since then."""
        total = DraftCounts()
        for number, now in (await self._read()).items():
            if (before := self._before.get(number)) is not None:
                total = DraftCounts(*(all_ + new - old for all_, new, old in zip(total, now, before, strict=True)))
        if not total.drafted or not total.checked:
            return {}
        return {
            "rollout/spec_accept_rate": total.accepted / total.drafted,
            "rollout/spec_accept_length": 1.0 + total.accepted / total.checked,
        }

    async def _read(self) -> dict[int, DraftCounts]:
        texts = await self._ask() if self._drafting else {}
        return {number: found for number, text in texts.items() if (found := counts_in(text)) is not None}


def counts_in(text: str) -> DraftCounts | None:
    """The counters in Prometheus' text, summed over labels; None if it has not all of them."""
    found = values_of(text, (CHECKED, DRAFTED, ACCEPTED))
    return found and DraftCounts(*(sum(found[name]) for name in (CHECKED, DRAFTED, ACCEPTED)))
