"""What share of the tokens that engines drafted was accepted while a rollout was made, by the engines' own counters.

    drafts = AcceptedDrafts(pool, options)
    await drafts.start_rollout()
    ...                                     # a rollout is made
    await drafts.measures()                 # rollout/spec_accept_rate, rollout/spec_accept_length

Invariant: an engine counts if it answered both when the rollout began and at its end; of one that was silent then, or
came meanwhile, what it counted before is not known.  Where nothing was drafted there is no number.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from hpcrl.config.options import Options
from hpcrl.rollout.engines.concurrency_limit import metrics_text, values_of
from hpcrl.rollout.engines.engine_pool import EnginePool

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
