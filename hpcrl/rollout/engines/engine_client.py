"""The client of all engines: a prompt's token ids in, token ids with log-probs and policy versions out.

Invariants: a response depends on prompt, sampling, seed and weights, not on what else is asked for; a response that was
aborted resumes from its exact tokens, each with the log-prob and the version that it was sampled under.  A request
whose engine dies is sent again elsewhere, a bounded number of times; one that is not waited for any more is dropped by
its engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace

import aiohttp
import numpy as np

from hpcrl.errors import DataError, DeadlineError, PeerError
from hpcrl.rollout.engines.completion import Completion, SampleCall, Sampling, read_completion, seed_of
from hpcrl.rollout.engines.engine_pool import EnginePool, PooledEngine
from hpcrl.transport.token_frames import ABORT, GENERATE, encode
from hpcrl.utils.sample_parts import ABORTED, TRUNCATED
from hpcrl.utils.waiting import Deadline, Pauses, retry_async

ATTEMPTS = 4  #: how often one request is sent at most
PAUSES = Pauses(0.2, 3.2, growth=4.0)  #: before a request is sent again
AGAIN = Pauses(0.05, 1.0)  #: after which an engine is asked again to end what has not ended
ABORTS = 3  #: how often a response that an engine ends unasked is begun again
_ABORT_TIMEOUT = aiohttp.ClientTimeout(total=30)


class PassingTrouble(Exception):
    """A request failed in a way that says nothing about the request: it may be sent again."""

    def __init__(self, text: str, engine: PooledEngine) -> None:
        super().__init__(text)
        self.engine = engine


class EngineClient:
    """Samples responses from the engines."""

    def __init__(self, pool: EnginePool, vocab_size: int) -> None:
        self._pool = pool
        self._vocab_size = vocab_size
        self._calls: set[SampleCall] = set()  # that have no answer yet

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

        The answer's status is ABORTED if `abort` ended it; it then holds what was there. A stop string that begins in
        `partial_tokens` and ends behind it is not seen.

        Args:
            begun: an earlier part of it, which the response continues and holds in full, its log-probs and versions as
                they were; the noise of what follows is made of `seed` and the length of that part.
            affinity: what shares a key is asked of the same engine where load allows (`EnginePool`); by default the
                samples of one prompt do.

        Raises:
            PeerError: names the engine whose answer is invalid, or that ends a request unasked again and again.
            DataError: if the engine's context leaves no room for a response.
        """
        there = 0 if begun is None else len(begun.tokens)
        room = None if self._pool.model_len is None else self._pool.model_len - len(prompt)
        if room is not None and room < 1:
            raise DataError(
                f"a prompt of {len(prompt)} tokens leaves no room in the engine's context of {self._pool.model_len}",
                "raise --rollout-max-context-len",
            )
        left = (sampling.max_tokens if room is None else min(sampling.max_tokens, room)) - there
        key = hash(prompt.tobytes()) if affinity is None else affinity
        if begun is not None and there:
            if left < 1:
                return replace(begun, status=TRUNCATED)
            prompt = np.concatenate([prompt, begun.tokens]).astype(np.int32, copy=False)
            seed = None if seed is None else seed_of(seed, there)
        for _ in range(ABORTS):
            call = SampleCall(
                affinity=key,
                prompt=prompt,
                sampling=sampling,
                seed=seed,
                partial_tokens=there,
                max_tokens=left,
                exact=room is not None,
                version=version,
            )
            self._calls.add(call)
            try:
                completion, engine = await self._ask(call)
            finally:
                self._calls.discard(call)
                call.over.set_result(None)
            if completion.status != ABORTED or call.ended:
                return completion.after(begun)
        raise PeerError(f"{engine} aborted one request {ABORTS} times", f"see {engine.log}" if engine else "")

    async def _ask(self, call: SampleCall) -> tuple[Completion, PooledEngine | None]:
        """The answer to a call and the engine that gave it, if any did before the call was ended."""
        try:  # after a pause: a server that answered 500 closes its connections first
            return await retry_async(lambda: self._try(call), PassingTrouble, Deadline(math.inf), PAUSES, ATTEMPTS)
        except PassingTrouble as error:
            what = f"{error.engine} failed a request {ATTEMPTS} times, last with {error}"
            raise PeerError(what, f"see {error.engine.log}") from error

    async def _try(self, call: SampleCall) -> tuple[Completion, PooledEngine | None]:
        if (engine := await self._pool.take(call)) is None:
            return Completion.empty(), None
        call.engine = engine
        try:
            return await self._send(engine, call), engine
        except PassingTrouble as error:
            # before it is given back: no other should run into it meanwhile
            await self._pool.examine(engine, str(error))
            raise
        finally:
            call.engine = None
            self._pool.give_back(engine)

    async def _send(self, engine: PooledEngine, call: SampleCall) -> Completion:
        """What an engine answers.

        Raises:
            PeerError: if it refuses or answers garbage, DeadlineError if it does not answer in time.
            PassingTrouble: for what may be tried again.
        """
        limit, body = self._pool.request_timeout, encode(call.request())
        try:
            async with (
                asyncio.timeout(limit),
                self._pool.session.post(engine.at(GENERATE), data=body, headers=engine.head) as answer,
            ):
                data = await answer.read()
        except aiohttp.ClientError as error:  # also a connection that takes too long
            raise PassingTrouble(f"{type(error).__name__}: {error}", engine) from error
        except TimeoutError as error:
            what = f"{engine} did not answer {GENERATE} within --request-timeout {limit:g} s"
            raise DeadlineError(what, f"see {engine.log}") from error
        if answer.status == 200:
            return read_completion(engine, call, data, self._vocab_size)
        trouble = f"HTTP {answer.status}: {data[:300].decode(errors='replace')}"
        if answer.status < 500:
            raise PeerError(f"{engine} refused {GENERATE}: {trouble}", f"see {engine.log}")
        raise PassingTrouble(trouble, engine)

    async def abort(self) -> None:
        """End every response in flight early, except an evaluation's: their `complete` returns what was there,
        ABORTED.

        All of them have returned, or are about to, when this does; what is asked for afterwards is not touched.

        Raises:
            DeadlineError: names an engine that does not end them within --request-timeout.
        """
        deadline = Deadline(self._pool.request_timeout)
        calls = {call for call in self._calls if not call.sampling.evaluation}
        for call in calls:
            call.ended = True
            if call.waiting is not None and not call.waiting.done():
                call.waiting.set_result(None)
        pauses = iter(AGAIN)
        while calls := {call for call in calls if not call.over.done()}:
            named: dict[PooledEngine, list[str]] = {}
            for call in calls:
                if call.engine is not None:
                    named.setdefault(call.engine, []).append(call.name)
            if deadline.over and named:
                limit, (engine, *_) = f"--request-timeout {self._pool.request_timeout:g} s", named
                raise DeadlineError(f"{engine} did not end {len(calls)} aborted samples within {limit}")
            await asyncio.gather(*(self._tell(engine, names) for engine, names in named.items()))
            await asyncio.wait([call.over for call in calls], timeout=next(pauses))

    async def _tell(self, engine: PooledEngine, names: list[str]) -> None:
        """Have an engine end the samples with these names; those that it does not know, it ignores."""
        # an engine that is lost shows in the sample's own request, and `abort` tells it again
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._pool.session.post(
                engine.at(ABORT), data=encode(names), headers=engine.head, timeout=_ABORT_TIMEOUT
            ) as answer:
                await answer.read()
