"""The client of all engines: a prompt's token ids in, token ids with log-probs and policy versions out.

`EngineClient.complete` is what samplers call; the `Dispatcher` behind it gathers, sends, sends again and aborts.

Invariants: a response depends on prompt, sampling, seed and weights, not on what else is asked for; a response that was
aborted resumes from its exact tokens, each with the log-prob and the version that it was sampled under.  What is asked
for in one turn of the event loop about one prompt goes out together; who asked first is served first; a request whose
engine dies is sent again elsewhere, a bounded number of times; a sample that is not waited for any more is aborted at
its engine; every sample gets one answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace

import aiohttp
import numpy as np

from hpcrl.errors import DataError, DeadlineError, PeerError
from hpcrl.rollout.engines import sampling_route
from hpcrl.rollout.engines.completion import Completion, ExpectedAnswer, PassingTrouble, PromptRequest, SampleCall
from hpcrl.rollout.engines.engine_pool import EnginePool, PooledEngine
from hpcrl.rollout.engines.sampling import Sampling, seed_of
from hpcrl.utils.deadline import Deadline
from hpcrl.utils.retry import Pauses
from hpcrl.utils.sample_parts import ABORTED, TRUNCATED

ATTEMPTS = 4  #: how often one request is sent at most
PAUSES = Pauses(0.2, 3.2, growth=4.0)  #: before a request is sent again
AGAIN = Pauses(0.05, 1.0)  #: after which an engine is asked again to end what has not ended


class Dispatcher:
    """Gathers, sends, sends again, ends."""

    def __init__(self, pool: EnginePool, vocab_size: int) -> None:
        self._pool = pool
        self._vocab_size = vocab_size
        self._gathering: dict[Hashable, PromptRequest] = {}
        self._waiting: deque[PromptRequest] = deque()
        self._queued = 0  # calls in `_waiting`, those that are not waited for any more included
        self._sent: dict[asyncio.Task[None], PromptRequest] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._woken = False
        pool.changed = self._wake

    def submit(self, key: Hashable, seed: int | None, make: Callable[[list[SampleCall]], PromptRequest]) -> SampleCall:
        """One sample of the request that `make` builds, together with all that are submitted under `key` in this
        turn."""
        call = SampleCall(seed, asyncio.get_running_loop().create_future())
        request = self._gathering.get(key)
        if request is None:
            self._gathering[key] = make([call])
            self._wake()
        else:
            request.calls.append(call)
        return call

    def give_up(self, call: SampleCall) -> None:
        """The caller of `call` waits no more: end it at its engine; a request that is not waited for, as a whole."""
        call.answer.cancel()
        if not call.in_flight or call.request is None or call.engine is None:
            return
        if not call.request.open() and call.request.task is not None:
            call.request.task.cancel()
        elif len(call.request.calls) > 1:
            errand = asyncio.create_task(self._tell(call.engine, [call.ident]))
            self._errands.add(errand)
            errand.add_done_callback(self._errands.discard)

    # ---- out

    def _wake(self) -> None:
        """Hand out what waits at the end of this turn."""
        if not self._woken:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._hand_out)

    def _hand_out(self) -> None:
        self._woken = False
        for request in self._gathering.values():
            self._waiting.append(request)
            self._queued += len(request.calls)
        self._gathering.clear()
        while self._waiting:
            request = self._waiting.popleft()
            self._queued -= len(request.calls)
            request.calls = request.open()
            try:
                while request.calls:
                    found = self._pool.assign_engine(
                        len(request.calls), self._queued + len(request.calls), request.affinity
                    )
                    if found is None:
                        self._put_back(request)
                        return
                    engine, count = found
                    part = request.part(request.calls[:count])
                    request.calls = request.calls[count:]
                    self._send(engine, part)
            except PeerError as error:  # no engine will ever serve: no other need wait for one
                _fail(request, error)

    def _put_back(self, request: PromptRequest) -> None:
        self._waiting.appendleft(request)
        self._queued += len(request.calls)

    def _send(self, engine: PooledEngine, request: PromptRequest) -> None:
        request.task = asyncio.create_task(self._serve(engine, request))
        for call in request.calls:
            call.engine = engine
            call.request = request
            call.in_flight = True
        self._sent[request.task] = request
        request.task.add_done_callback(self._sent.pop)

    async def _serve(self, engine: PooledEngine, request: PromptRequest) -> None:
        """Send one request, and see to it that each of its calls gets its answer."""
        trouble = ""
        try:
            trouble = await self._try(engine, request)
            if trouble:
                await self._pool.examine(
                    engine, trouble
                )  # before it is given back: no other should run into it meanwhile
        except Exception as error:  # noqa: BLE001  (the caller is to hear of it)
            _fail(request, error)
        finally:
            for call in request.calls:
                self._release(call)
        if trouble:
            await self._again(engine, request, trouble)

    async def _try(self, engine: PooledEngine, request: PromptRequest) -> str:
        """What went wrong, if that says nothing about the request.

        Raises:
            HpcrlError: if it was refused, or answered by garbage.
        """
        limit = self._pool.request_timeout
        wanted = ExpectedAnswer(
            self._vocab_size, request.sampling.logprobs, request.max_tokens, request.version, request.exact
        )
        try:
            async with asyncio.timeout(limit):
                await sampling_route.request_samples(engine, request, wanted, self._deliver)
        except PassingTrouble as error:
            return str(error)
        except aiohttp.ClientError as error:
            return f"{type(error).__name__}: {error}"
        except TimeoutError as error:
            what = f"{engine} did not answer {sampling_route.PATH} within --request-timeout {limit:g} s"
            raise DeadlineError(what, f"see {engine.log}") from error
        return ""

    async def _again(self, engine: PooledEngine, request: PromptRequest, trouble: str) -> None:
        """Let what is unanswered wait for another try, after a pause: a server that answered 500 closes its connections
        first."""
        tries = request.tries + 1
        if tries >= ATTEMPTS:
            _fail(
                request, PeerError(f"{engine} failed a request {tries} times, last with {trouble}", f"see {engine.log}")
            )
            return
        for call in request.open():
            if call.ended:
                call.answer.set_result(Completion.empty())
        await asyncio.sleep(PAUSES.after(tries))
        if calls := request.open():
            self._put_back(request.part(calls, tries))
            self._wake()

    # ---- back

    def _deliver(self, call: SampleCall, completion: Completion) -> None:
        self._release(call)
        if not call.answer.done():
            call.answer.set_result(completion)

    def _release(self, call: SampleCall) -> None:
        """`call` is in flight no more."""
        if call.in_flight and call.engine is not None:
            # or else each would hold the other until a collection
            call.in_flight = False
            call.request = None
            self._pool.give_back(call.engine)
            if self._waiting:
                self._wake()

    # ---- ends before the end

    async def abort(self) -> None:
        """End every sample in flight, but for an evaluation's; each has its answer when this returns.

        Raises:
            DeadlineError: names the engine that does not end what it was told to within --request-timeout.
        """
        deadline = Deadline(self._pool.request_timeout)
        requests = [*self._gathering.values(), *self._waiting, *self._sent.values()]
        calls = [call for request in requests if not request.sampling.evaluation for call in request.open()]
        for call in calls:
            call.ended = True
            if not call.in_flight:
                call.answer.set_result(Completion.empty())
        if left := await self._abort_calls(calls, deadline):
            limit = f"--request-timeout {self._pool.request_timeout:g} s"
            raise DeadlineError(f"{left[0].engine} did not end {len(left)} aborted samples within {limit}")

    async def _abort_calls(self, calls: list[SampleCall], deadline: Deadline) -> list[SampleCall]:
        """Tell engines to end these until they have; those that have not by `deadline`."""
        pauses = iter(AGAIN)
        while calls := [call for call in calls if not call.answer.done()]:
            if deadline.over:
                return calls
            await asyncio.gather(*(self._tell(engine, idents) for engine, idents in _by_engine(calls).items()))
            await asyncio.wait([call.answer for call in calls], timeout=next(pauses))
        return []

    async def _tell(self, engine: PooledEngine, idents: list[str]) -> None:
        try:
            await sampling_route.abort(engine, idents)
        except (aiohttp.ClientError, TimeoutError):
            return  # the request itself finds out what is wrong there; and it is told again


def _by_engine(calls: list[SampleCall]) -> dict[PooledEngine, list[str]]:
    found: dict[PooledEngine, list[str]] = {}
    for call in calls:
        if call.in_flight and call.engine is not None:
            found.setdefault(call.engine, []).append(call.ident)
    return found


def _fail(request: PromptRequest, error: Exception) -> None:
    for call in request.open():
        call.answer.set_exception(error)


ABORTS = 3  #: how often a response that an engine ends unasked is begun again


class EngineClient:
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

        The answer's status is ABORTED if `abort` ended it; it then holds what was there. A stop string that begins in
        `partial_tokens` and ends behind it is not seen.

        Args:
            begun: an earlier part of it, which the response continues and holds in full, its log-probs and versions as
                they were; the noise of what follows is made of `seed` and the length of that part.
            affinity: what shares a key is asked of the same engine where load allows (`EnginePool`), as are, without
                one, samples of one prompt that are asked for at once.

        Raises:
            PeerError: names the engine whose answer is none, or that ends a request unasked again and again.
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
        if begun is not None and there:
            if left < 1:
                return replace(begun, status=TRUNCATED)
            prompt = np.concatenate([prompt, begun.tokens]).astype(np.int32, copy=False)
            seed = None if seed is None else seed_of(seed, there)

        def request(calls: list[SampleCall]) -> PromptRequest:
            return PromptRequest(prompt, sampling, there, left, room is not None, version, affinity, calls)

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
        where = call.engine
        raise PeerError(f"{where} aborted one request {ABORTS} times", f"see {where.log}" if where else "")

    async def abort(self) -> None:
        """End every response in flight early, but for an evaluation's: their `complete` returns what was there,
        ABORTED.

        All of them have returned, or are about to, when this does; what is asked for afterwards is not touched.

        Raises:
            DeadlineError: names an engine that does not end them within --request-timeout.
        """
        await self._dispatcher.abort()
