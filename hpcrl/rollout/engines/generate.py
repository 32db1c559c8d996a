"""Responses of the policy: a prompt's token ids in, token ids with log-probs and policy versions out.

Invariants: a response depends on prompt, sampling, seed and weights, not on what else is asked for; a response that was
ended early goes on from its exact tokens, each with the log-prob and the version that it was sampled under.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from hpcrl.errors import DataError, PeerError
from hpcrl.rollout.engines.completion import Completion
from hpcrl.rollout.engines.dispatch import Dispatcher
from hpcrl.rollout.engines.engine_pool import EnginePool
from hpcrl.rollout.engines.request import Call, Request
from hpcrl.rollout.engines.sampling import Sampling, seed_of
from hpcrl.sample import ABORTED, TRUNCATED

__all__ = ["Completion", "Generator", "Sampling", "seed_of"]

ABORTS = 3  #: how often a response that an engine ends unasked is begun again


class Generator:
    """Samples responses from the engines."""

    def __init__(self, pool: EnginePool, vocab_size: int) -> None:
        self._pool = pool
        self._dispatcher = Dispatcher(pool, vocab_size)

    async def complete(
        self,
        prompt: np.ndarray,
        sampling: Sampling,
        seed: int | None,
        version: int,
        begun: Completion | None = None,
        affinity: str | None = None,
    ) -> Completion:
        """One response to `prompt` (int32 token ids), asked for under policy `version`.

        begun: an earlier part of it, which the response goes on from and holds in full, its log-probs and versions as
        they were; the noise of what follows is made of `seed` and the length of that part.  affinity: what shares a key
        is asked of the same engine where load allows (`EnginePool`), as are, without one, samples of one prompt that
        are asked for at once.

        The answer's status is ABORTED if `abort` ended it; it then holds what was there.  A stop string that begins in
        `begun` and ends behind it is not seen.

        PeerError names the engine whose answer is none, or that ends a request unasked again and again; DataError if
        the engine's context leaves no room for a response.
        """
        whole = prompt
        noise = seed
        there = 0 if begun is None else len(begun.tokens)
        room = None if self._pool.model_len is None else self._pool.model_len - len(prompt)
        if room is not None and room < 1:
            raise DataError(
                f"a prompt of {len(prompt)} tokens leaves no room in the engine's context of {self._pool.model_len}",
                "raise --rollout-max-context-len",
            )
        left = (sampling.max_tokens if room is None else min(sampling.max_tokens, room)) - there
        if begun is not None and there:
            if left < 1:
                return replace(begun, status=TRUNCATED)
            prompt = np.concatenate([prompt, begun.tokens]).astype(np.int32, copy=False)
            seed = None if seed is None else seed_of(seed, there)

        def request(calls: list[Call]) -> Request:
            return Request(prompt, sampling, there, left, room is not None, version, affinity, calls)

        key = (prompt.tobytes(), sampling, left, version, affinity)
        for _ in range(ABORTS):
            call = self._dispatcher.submit(key, seed, request)
            try:
                completion = await call.answer
            except asyncio.CancelledError:
                self._dispatcher.give_up(call)
                raise
            if completion.status != ABORTED or call.ended:
                return completion.after(begun)
            if call.moved:
                return await self.complete(whole, sampling, noise, version, completion.after(begun), affinity)
        where = call.engine
        raise PeerError(f"{where} aborted one request {ABORTS} times", f"see {where.log}" if where else "")

    async def abort(self) -> None:
        """End every response in flight early, but for an evaluation's: their `complete` returns what was there,
        ABORTED.

        All of them have returned, or are about to, when this does; what is asked for afterwards is not touched.
        DeadlineError names an engine that does not end them within --request-timeout.
        """
        await self._dispatcher.abort()
