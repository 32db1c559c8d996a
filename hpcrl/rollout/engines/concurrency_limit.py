"""How many samples to have in flight, by what the engines themselves say: requests that wait, and how full their KV
cache is.

What waits in an engine's queue has been promised and is not begun: it only grows old.  So as soon as requests wait, or
caches are nearly full (an engine then throws out what it has begun), no more are sent than the engines work on, and one
group each; while nothing waits, the limit grows.

Invariant: without any reading there is no limit but the pool's own; with one it never is below one group an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp

from hpcrl.config.options import Options
from hpcrl.rollout.engines.engine_pool import EnginePool, PooledEngine

PATH = "/metrics"
SECONDS = 5.0  #: that an engine has to answer
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
        if self.limit is None:
            return wanted
        return max(0, min(wanted, (self.limit - in_flight) // self.group))


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


async def read_metrics(pool: EnginePool) -> list[EngineMetrics]:
    """What the living engines say; an engine that does not answer in time is left out: others find out what is wrong
    there."""
    found = await asyncio.gather(*(metrics_text(pool, engine) for engine in pool.engines))
    return [reading for text in found if text is not None and (reading := parse(text)) is not None]


async def metrics_text(pool: EnginePool, engine: PooledEngine) -> str | None:
    """What an engine says of itself, Prometheus' text; None if it does not within SECONDS."""
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    try:
        async with pool.session.get(engine.at(PATH), headers=engine.head, timeout=timeout) as answer:
            return await answer.text() if answer.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None


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
    """The counters of a pool's engines, from `start_rollout` on."""

    def __init__(self, pool: EnginePool, options: Options) -> None:
        self._pool = pool
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
        if not self._drafting:
            return {}
        engines = list(self._pool.engines)
        found = await asyncio.gather(*(metrics_text(self._pool, engine) for engine in engines))
        read = ((engine.number, counts_in(text)) for engine, text in zip(engines, found, strict=True) if text)
        return {number: counts for number, counts in read if counts is not None}


def counts_in(text: str) -> DraftCounts | None:
    """The counters in Prometheus' text, summed over labels; None if it has not all of them."""
    found = values_of(text, (CHECKED, DRAFTED, ACCEPTED))
    if found is None:
        return None
    return DraftCounts(sum(found[CHECKED]), sum(found[DRAFTED]), sum(found[ACCEPTED]))
